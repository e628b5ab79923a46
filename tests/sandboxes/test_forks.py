"""Tests that each program in a sandbox has the same restrictions, however its process was forked."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from rollflow.tasks.sandboxes.base import Program, Sandbox
from tests.sandboxes.box import CONFIG, LONG, PYTHON, Box
from tests.sandboxes.programs.base import PRELUDE
from tests.support.sandbox_processes import list_sandbox_processes

# prints the rights of the program, and the results of system calls that must fail (socketpair only with these
# arguments)
RIGHTS = PRELUDE + (
    "import json\nlines = dict(l.strip().split(':', 1) for l in open('/proc/self/status'))\n"
    "kept = ('CapInh', 'CapPrm', 'CapEff', 'CapAmb', 'CapBnd', 'NoNewPrivs', 'Seccomp', 'Seccomp_filters')\n"
    "calls = [libc.unshare(0x10000000), libc.setns(0, 0), libc.mount(b'a', b'/work', b'tmpfs', 0, b''), "
    "libc.socket(2, 1, 0), libc.socketpair(1, 2, 0, bytes(8)), libc.memfd_create(b'a', 0)]\n"
    "print(json.dumps([{k: lines[k] for k in kept if k in lines}, calls, os.getpid() > 1, os.getsid(0) == os.getpid(), "
    "os.getppid(), sorted(os.listdir('/proc/self/fd')), signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL]))"
)
LEAVE = Program(code=PRELUDE + "forks(1, lambda: time.sleep(600))", timeout=LONG, keep_children=True)


async def find_rights(sandbox: Sandbox, *, command: bool = False, keep_children: bool = False) -> Any:
    """Return what a program prints about its rights."""
    program = Program(code=RIGHTS, timeout=LONG, keep_children=keep_children)
    if command:
        program = Program(command=[PYTHON, "-c", RIGHTS], timeout=LONG, keep_children=keep_children)
    found = await sandbox.exec(program)
    assert found.succeeded, found
    return json.loads(found.stdout)


def test_every_program_of_a_sandbox_has_the_same_rights(box: Box) -> None:
    async def work() -> None:
        sandbox = await box.sandboxes.create()
        rights, calls, *_ = first = await find_rights(sandbox)
        assert calls == [-1] * 6
        assert {rights[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"\t" + "0" * 16}
        assert (rights["NoNewPrivs"], rights["Seccomp"]) == ("\t1", "\t2")
        assert await find_rights(sandbox, keep_children=True) == first  # in the same process namespace
        await sandbox.exec(LEAVE)
        assert await find_rights(sandbox) == first  # beside a process of an earlier program, which is then killed
        assert await find_rights(sandbox) == first  # in another process namespace with the same folder
        as_command = await find_rights(sandbox, command=True)
        assert (as_command[0], as_command[1]) == (rights, calls)
        await sandbox.close()

    box.do(work())


def test_sandbox_keeps_its_folder_when_processes_are_killed(box: Box) -> None:
    async def work() -> None:
        sandbox = await box.sandboxes.create()
        await sandbox.upload("kept", b"data")
        await sandbox.exec(LEAVE)
        for _ in range(2):
            found = await sandbox.exec(Program(code="print(open('kept').read())", timeout=LONG))
            assert found.stdout == b"data\n"
        await sandbox.close()

    box.do(work())


THREADS = """
import ctypes, os, threading
libc = ctypes.CDLL(None)
lock = ctypes.create_string_buffer(64)
kind = ctypes.create_string_buffer(64)
libc.pthread_mutexattr_init(kind); libc.pthread_mutexattr_settype(kind, 1)
libc.pthread_mutex_init(lock, kind)
libc.pthread_mutex_lock(lock)
owner = ctypes.c_int.from_buffer(lock, 8).value
found = []
thread = threading.Thread(target=lambda: found.append(libc.pthread_mutex_trylock(lock)))
thread.start(); thread.join()
print(owner == os.getpid(), found, libc.pthread_mutex_unlock(lock))
"""


def test_forked_program_knows_its_thread_id(box: Box) -> None:
    """Without the right thread id, a lock of the C library could mistake two threads for the same thread."""

    async def work() -> None:
        sandbox = await box.sandboxes.create()
        for _ in range(2):  # programs with different process ids
            found = await sandbox.exec(Program(code=THREADS, timeout=LONG))
            assert found.stdout == b"True [16] 0\n", found
        await sandbox.close()

    box.do(work())


# This program leaves a process behind that overwrites the function `prctl` in the memory of each later program. `prctl`
# then does nothing and reports success.
ATTACK = """
import ctypes, os, time
libc = ctypes.CDLL(None)
place = ctypes.cast(libc.prctl, ctypes.c_void_p).value
code = bytes.fromhex({"x86_64": "31c0c3", "aarch64": "00008052c0035fd6"}[os.uname().machine])
if os.fork() == 0:
    last, end = os.getpid(), time.time() + 60
    load = os.open("/proc/loadavg", os.O_RDONLY)
    while time.time() < end:
        newest = int(os.pread(load, 200, 0).split()[-1])
        if newest == last:
            continue
        last, memory = newest, -1
        while memory < 0:
            try:
                memory = os.open(f"/proc/{newest}/mem", os.O_RDWR)
            except PermissionError:
                continue
            except OSError:
                break
        try:
            os.pwrite(memory, code, place)
        except OSError:
            pass
    os._exit(0)
"""
RESTRICTED = """
import ctypes, resource
libc = ctypes.CDLL(None)
state = [line.split()[1] for line in open("/proc/self/status") if line.startswith("Seccomp:")]
print(state, libc.socket(1, 1, 0), libc.unshare(0x10000000), resource.getrlimit(resource.RLIMIT_FSIZE)[0])
"""


def test_earlier_program_removes_no_restriction_of_a_later_one(box: Box) -> None:
    """While a program is being prepared, other processes in the sandbox cannot open the memory of the program."""

    async def work() -> None:
        sandbox = await box.sandboxes.create()
        alone = await sandbox.exec(Program(code=RESTRICTED, timeout=LONG))
        assert alone.stdout == f"['2'] -1 -1 {CONFIG.folder_bytes}\n".encode()
        await sandbox.exec(Program(code=ATTACK, timeout=LONG, keep_children=True))
        for _ in range(40):
            found = await sandbox.exec(Program(code=RESTRICTED, timeout=LONG, keep_children=True))
            assert found.stdout == alone.stdout, found
        await sandbox.close()

    box.do(work())


def list_capable() -> list[int]:
    """List the processes of sandboxes that have a Linux capability (a right of root)."""
    found = []
    for process in list_sandbox_processes():
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{process.pid}/status").read_text()
            if int(state.partition("CapEff:")[2].split()[0], 16):
                found.append(process.pid)
    return found


def test_only_two_sandbox_processes_have_a_capability(box: Box) -> None:
    """The two processes are the holder, which forks the programs, and process 1 of the programs' namespace, which
    shares the holder's memory and runs no code.
    """

    async def work() -> None:
        before = set(list_capable())
        sandbox = await box.sandboxes.create()
        await sandbox.exec(LEAVE)
        assert len(set(list_capable()) - before) == 2
        await sandbox.close()

    box.do(work())


def test_sandboxed_program_sees_no_socket_of_other_sandboxes(box: Box) -> None:
    """A program could otherwise count the sandboxes of the box."""

    async def work() -> None:
        others = [await box.sandboxes.create() for _ in range(3)]
        for other in others:
            await other.exec(Program(code="pass", timeout=LONG))
        for _ in range(100):  # a sandbox has a socket for a moment while it starts
            found = await box.sandboxes.run(Program(code="print(open('/proc/net/unix').read())", timeout=LONG))
            if len(found.stdout.split(b"\n")) == 3:
                break
            await asyncio.sleep(0.05)
        else:
            pytest.fail(f"a program sees the sockets of other sandboxes: {found}")
        for other in others:
            await other.close()

    box.do(work())
