"""Starts the worker processes of one environment, and controls them from an event loop.

The first worker process, the keeper (see `guest.keeper`), starts and ends the other worker processes. If the keeper
dies, the kernel kills the others. `Guest` starts the keeper with a random value, the mark, in an environment variable.
Child processes inherit the variable. After the end of the keeper, `Guest` kills each process that still has the mark.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollflow.storage.errors import ConfigError
from rollflow.tasks.environments.guest import boot
from rollflow.tasks.environments.guest.wire import LONGEST_PACKET, MARK, pack_packet, receive_packet, send_packet

END_SECONDS = 10.0  # largest number of seconds that the first worker process may take to end
AGAIN_SECONDS = 0.01  # seconds between two tries to write to a full socket, or to kill processes
# libraries of numpy would otherwise start threads, and a process with threads cannot be forked safely
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Guest:
    """The worker processes of one environment, controlled by one event loop."""

    def __init__(self, python: str, spec: Mapping[str, Any]) -> None:
        self._python, self._spec = python, spec
        self.mark = secrets.token_hex(8)
        self.ready: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()  # set once the keeper is gone
        self.keeper = 0  # process id of the keeper
        self._ended: dict[int, asyncio.Future[int]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._release = weakref.finalize(self, _close_control, asyncio.get_running_loop(), self._control)

    async def start(self) -> None:
        """Start the first worker process.

        Raises:
            OSError: the interpreter cannot be started.
            ConfigError: the description of the environment is too long.
        """
        packet = pack_packet(dict(self._spec))
        if len(packet) > LONGEST_PACKET:
            raise ConfigError(
                f"environment.options: the options have {len(packet)} bytes as JSON, more than the "
                f"{LONGEST_PACKET} that a worker process can take; put the data into a file"
            )
        try:
            self._process = await asyncio.to_thread(self._run_keeper)
        finally:
            self._theirs.close()
        self.keeper = self._process.pid
        with contextlib.suppress(OSError):  # if the first worker process has ended, `_read` notices it
            self._control.send(packet)
        asyncio.get_running_loop().add_reader(self._control, _call_weakly(self._read))

    async def open_episode(self, number: int) -> socket.socket:
        """Start the process of an episode, and return a socket that is connected to it.

        Raises:
            OSError: the keeper (first worker process) is gone.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._ended[number] = asyncio.get_running_loop().create_future()
        try:
            while True:
                try:
                    send_packet(self._control, {"do": "start", "number": number}, (theirs.fileno(),))
                    return ours
                except BlockingIOError:
                    await asyncio.sleep(AGAIN_SECONDS)
        except BaseException:
            ours.close()
            self.forget(number)  # the episode was never started, so its end will not be reported
            raise
        finally:
            theirs.close()

    def kill(self, number: int) -> None:
        """Kill the process tree of an episode."""
        try:
            send_packet(self._control, {"do": "kill", "number": number})
        except BlockingIOError:
            asyncio.get_running_loop().call_later(AGAIN_SECONDS, self.kill, number)
        except OSError:  # the first worker process has ended, and all episodes with it
            pass

    def end_of(self, number: int) -> asyncio.Future[int]:
        """Return the wait status of an episode's process, as a future."""
        return self._ended[number]

    def has_episode(self, number: int) -> bool:
        """Return whether there is a record of an episode (see `forget`)."""
        return number in self._ended

    def forget(self, number: int) -> None:
        """Drop the record of an episode that has ended."""
        self._ended.pop(number, None)

    async def close(self) -> None:
        """End all worker processes of the environment."""
        self._lose()
        self._theirs.close()
        if self._process is not None:
            await asyncio.to_thread(end_guest, self._process, self.mark)

    def _run_keeper(self) -> subprocess.Popen[bytes]:
        environment = {**ONE_THREAD, **os.environ, MARK: self.mark}
        if self._python:  # PYTHONPATH may contain packages that only rollflow's interpreter can use
            environment.pop("PYTHONPATH", None)
        return subprocess.Popen(
            [self._python or sys.executable, boot.__file__, str(self._theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment,
            pass_fds=[self._theirs.fileno()],
            start_new_session=True,
        )

    def _read(self) -> None:
        """Read the messages of the keeper that have arrived."""
        while True:
            try:
                message, _ = receive_packet(self._control)
            except BlockingIOError:
                return
            except (EOFError, OSError, ValueError):
                self._lose()
                if self._process is not None:
                    process, mark = self._process, self.mark
                    asyncio.get_running_loop().run_in_executor(None, end_guest, process, mark)
                return
            if "ready" in message and not self.ready.done():
                self.ready.set_result(message)
            elif "ended" in message and message["ended"] in self._ended:
                ended = self._ended[message["ended"]]
                if not ended.done():
                    ended.set_result(message["status"])

    def _lose(self) -> None:
        """Close the control socket, and end all waits for answers of the first worker process."""
        self._release()
        self.lost.set()
        if not self.ready.done():
            self.ready.set_result({"error": "the first worker process ended before the import"})
        for ended in self._ended.values():
            if not ended.done():
                ended.set_result(signal.SIGKILL)


def _call_weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls a method without keeping the method's object in memory."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (found := reference()) is not None:
            found()

    return call


def _close_control(loop: asyncio.AbstractEventLoop, control: socket.socket) -> None:
    """Close the control socket, so that the first worker process ends all worker processes."""
    if not loop.is_closed():
        loop.remove_reader(control)
    control.close()


def end_guest(process: subprocess.Popen[bytes], mark: str) -> None:
    """Wait until all worker processes have ended, and kill those that remain."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)
    while found := list_marked(mark):
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(AGAIN_SECONDS)
    process.wait()


def list_marked(mark: str) -> list[int]:
    """List the ids of the running processes whose environment variables contain the mark."""
    sought, found = f"{MARK}={mark}".encode(), list[int]()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError):
            if not entry.name.isdigit() or sought not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":  # it still runs
                found.append(int(entry.name))
    return found


def decode_line(line: bytes) -> Mapping[str, Any]:
    """Decode an answer of an episode's process; raise `ValueError` if the line is not a JSON object."""
    try:
        found = json.loads(line)
    except RecursionError:
        raise ValueError("the answer of the worker process is nested too deeply to be read as JSON") from None
    if not isinstance(found, dict):
        raise ValueError("the answer of the worker process is not a JSON object")
    return found
