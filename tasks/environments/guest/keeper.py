"""Starts and ends the worker processes of one environment; the first of them, the keeper, runs no code of the user.

    rollflow --control socket--> keeper --> template     imports the user's class once
        |                          |            `.fork
        `----socket of an episode--+------> episode ...  one process for each live episode

- The user's class is imported once, in the template process, from which each episode is forked. If the import starts
  threads, each episode imports the class itself, because forking a process with threads is unsafe.
- The process of an episode has its own process group and adopts orphaned descendants (subreaper), so that all processes
  that it starts can be killed with it.
- A process that an ended episode leaves behind becomes a child of the keeper, which kills it.
- If rollflow or the keeper dies, all worker processes end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import time
from typing import Any

from rollflow.tasks.environments.guest.episode import load_class, serve_episode
from rollflow.tasks.environments.guest.wire import Fields, describe_error, receive_packet, send_packet

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SOON = 0.001  # seconds between two checks of the parent of a new episode
OOM_SCORE = "500"  # when memory is short, the kernel kills episodes before rollflow's own processes
Start = tuple[Fields, list[int]]  # a request to start an episode, with the episode's socket


class GuestKeeper:
    """Starts and ends the processes of an environment."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._spec, _ = receive_packet(control)
        self._pid = os.getpid()
        self._template = 0  # process id of the template; 0 if no template is running
        self._link: socket.socket | None = None  # connection to the template process
        self._is_safe = True  # False if forking the template is unsafe because it has threads
        self._is_ready = False
        self._episodes: dict[int, int] = {}  # number of an episode -> its process id
        self._doomed: set[int] = set()  # episodes to kill as soon as the template has started them
        self._waiting: list[Start] = []  # episodes that the template has not been asked to start
        self._asked: dict[int, Start] = {}  # episodes that the template has been asked to start
        self._child, self._wakeup = os.pipe()
        os.set_blocking(self._child, False)
        os.set_blocking(self._wakeup, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup)

    def serve(self) -> None:
        """Start and end worker processes until rollflow is gone."""
        self._start_template()
        while True:
            links: list[Any] = [self._link] if self._link else []
            reads: list[Any] = [self._control, self._child, *links]
            ready, _, _ = select.select(reads, links if self._waiting else [], [])
            if self._child in ready:
                os.read(self._child, 4096)
                self._reap()
            self._read_template()
            if self._control in ready:
                message, fds = receive_packet(self._control)
                getattr(self, "do_" + message["do"])(message, fds)
            self._forward()

    def do_start(self, message: Fields, fds: list[int]) -> None:
        """Start the process of an episode, and pass the socket in `fds` to the process."""
        if self._is_safe:
            self._waiting.append((message, fds))
            if not self._link:
                self._start_template()
            return
        pid = os.fork()
        if not pid:
            self._become_episode(fds[0], None)
        self._episodes[message["number"]] = pid
        os.close(fds[0])

    def do_kill(self, message: Fields, fds: list[int]) -> None:
        """Kill an episode."""
        if message["number"] in self._episodes:
            self._kill_tree(self._episodes[message["number"]])
        else:
            self._doomed.add(message["number"])

    def kill_all(self) -> None:
        """Kill all worker processes except this one, until none is left."""
        signal.set_wakeup_fd(-1)
        while list_children(self._pid):
            for pid in list_children(self._pid):
                self._kill_tree(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)

    def _start_template(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if not pid:
            ours.close()
            self._become_template(theirs)
        theirs.close()
        ours.setblocking(False)
        self._template, self._link = pid, ours

    def _read_template(self) -> None:
        """Read the template's messages: which episodes it has started, and whether it is ready."""
        while self._link:
            try:
                message, _ = receive_packet(self._link)
            except BlockingIOError:
                return
            except (EOFError, OSError):
                self._lose_template()
                return
            if "born" in message:
                self._episodes[message["born"]] = message["pid"]
                for fd in self._asked.pop(message["born"])[1]:
                    os.close(fd)
                if message["born"] in self._doomed:
                    self._doomed.discard(message["born"])
                    self._kill_tree(message["pid"])
            else:
                self._is_safe = not message.get("threads")
                self._tell_ready(message)
                if not self._is_safe:
                    self._kill_tree(self._template)

    def _forward(self) -> None:
        """Ask the template to start the waiting episodes, until the connection's buffer is full."""
        while self._waiting and self._link:
            message, fds = self._waiting[0]
            try:
                send_packet(self._link, message, tuple(fds))
            except BlockingIOError:
                return
            except OSError:
                self._lose_template()
                return
            self._asked[message["number"]] = self._waiting.pop(0)

    def _lose_template(self) -> None:
        """Let a new template process start the episodes that the ended template has not started. An episode is given up
        after its second failed start.
        """
        assert self._link is not None
        self._link.close()
        self._link = None
        lost, self._asked = list(self._asked.values()), {}
        waiting, self._waiting = self._waiting, []
        for message, fds in lost:
            if message.get("again"):
                os.close(fds[0])
                send_packet(self._control, {"ended": message["number"], "status": int(signal.SIGKILL)})
            else:
                self.do_start({**message, "again": True}, fds)
        for message, fds in waiting:
            self.do_start(message, fds)

    def _reap(self) -> None:
        """Collect the exit statuses of ended processes, and kill processes that ended episodes have left behind.

        A child that was not announced by the template was left behind by an ended episode.
        """
        children, ended = list_children(self._pid), set()
        self._read_template()
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                ended.add(pid)
                self._note_end(pid, status)
        for pid in set(children) - ended - {self._template, *self._episodes.values()}:
            self._kill_tree(pid)

    def _note_end(self, pid: int, status: int) -> None:
        if pid == self._template:
            self._template = 0
            self._tell_ready({"error": "the process that imports the class ended " + describe_status(status)})
        for number in [number for number, one in self._episodes.items() if one == pid]:
            del self._episodes[number]
            kill_group(pid)
            send_packet(self._control, {"ended": number, "status": status})

    def _tell_ready(self, message: Fields) -> None:
        """Report to rollflow, once, that episodes can start, or why they cannot start."""
        if not self._is_ready:
            self._is_ready = True
            send_packet(self._control, {"ready": True, **message})

    def _become_template(self, link: socket.socket) -> None:
        """Run the template process: import the user's class, and fork a process for each episode. Errors must not
        return to the code of the calling process."""
        with contextlib.suppress(BaseException):
            self._leave()
            end_with_parent(self._pid)
            os.setsid()
            try:
                load_class(self._spec)
                send_packet(link, {"threads": len(os.listdir("/proc/self/task")) - 1})
            except BaseException as error:  # noqa: BLE001 - the user's module may raise anything, or exit
                send_packet(link, {"error": describe_error(error)})
            while True:
                message, fds = receive_packet(link)
                middle = os.fork()
                if not middle:
                    self._fork_episode(message["number"], fds[0], link)
                os.close(fds[0])
                if os.waitpid(middle, 0)[1]:  # the machine could not create another process
                    break
        os._exit(0)

    def _fork_episode(self, number: int, fd: int, link: socket.socket) -> None:
        """Fork the process of an episode, announce it, and end this process, so that the keeper becomes the parent of
        the episode's process.
        """
        with contextlib.suppress(OSError):
            pid = os.fork()
            if not pid:
                self._become_episode(fd, link)
            send_packet(link, {"born": number, "pid": pid})
            os._exit(0)
        os._exit(1)

    def _become_episode(self, fd: int, link: socket.socket | None) -> None:
        """Serve one episode in this process, and end the process. Errors must not return to the code of the calling
        process."""
        with contextlib.suppress(BaseException):
            if link:
                link.close()
            else:
                self._leave()
            while link and os.getppid() != self._pid and os.path.exists(f"/proc/{self._pid}"):
                time.sleep(SOON)
            end_with_parent(self._pid)
            os.setsid()
            set_process_option(PR_SET_CHILD_SUBREAPER, 1)
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write(OOM_SCORE)
            os.set_inheritable(fd, False)
            serve_episode(socket.socket(fileno=fd), self._spec)
        os._exit(0)

    def _leave(self) -> None:
        """Close the files and handlers that only the parent of this forked process needs."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        for fd in (
            self._wakeup,
            self._child,
            *(fd for _, fds in (*self._waiting, *self._asked.values()) for fd in fds),
        ):
            os.close(fd)
        if self._link:
            self._link.close()

    def _kill_tree(self, pid: int) -> None:
        """Kill a process, its process group and all its descendants."""
        found = [pid]
        for one in found:
            found += list_children(one)  # the loop also visits the ids that are appended here
        kill_group(pid)
        for one in found:
            with contextlib.suppress(OSError):
                os.kill(one, signal.SIGKILL)


def list_children(pid: int) -> list[int]:
    """Return the process ids of a process's children."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def kill_group(pid: int) -> None:
    """Kill the process group that a process has created."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def describe_status(status: int) -> str:
    """Return a text that says how a process ended, from its wait status."""
    if os.WIFSIGNALED(status):
        return f"by signal {os.WTERMSIG(status)}"
    return f"with exit code {os.WEXITSTATUS(status)}"


def set_process_option(option: int, value: int) -> None:
    """Set an option of this process with the system call `prctl`."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies."""
    set_process_option(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def run(control: int) -> None:
    """Run the keeper; `control` is the file descriptor of the socket to rollflow."""
    set_process_option(PR_SET_CHILD_SUBREAPER, 1)
    # `select` accepts no file descriptor above 1023, so the descriptor is duplicated to get a small number.
    connection = socket.socket(fileno=os.dup(control))
    os.close(control)
    keeper = GuestKeeper(connection)
    try:
        keeper.serve()
    except (EOFError, OSError):  # rollflow is gone
        pass
    finally:
        keeper.kill_all()
