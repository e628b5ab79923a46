"""Tests the keeper, the process that supervises a sandbox: hostile programs cannot disturb it, and honest programs run
without errors.
"""

from __future__ import annotations

import asyncio
import socket

import pytest

from rollflow.tasks.sandboxes.base import Program, ProgramEnd, Sandbox, SandboxFailed
from rollflow.tasks.sandboxes.config import MIB
from tests.sandboxes.box import LONG, SECRET, Box
from tests.sandboxes.programs.base import PRELUDE
from tests.support.sandbox_processes import list_sandbox_processes


def warm(code: str, timeout: float = LONG, channel: socket.socket | None = None) -> Program:
    """Return a program of Python source that may use the functions in `PRELUDE`."""
    return Program(code=PRELUDE + code, timeout=timeout, channel=channel)


LINKS = """
for name, target in dict(environ='/proc/self/environ', mem='/proc/self/mem', folder='/proc/self', root='/proc/1/root',
    maps='/proc/self/pagemap', up='..', out='/usr/lib', zero='/dev/zero', null='/dev/null', loop='loop').items():
    os.symlink(target, name)
os.mkfifo('pipe'); os.mkdir('sub'); os.symlink('../../proc/self', 'sub/relative'); os.mkfifo('sub/pipe')
open('sparse', 'wb').truncate(8 << 20)
"""
OUTSIDE = (
    *("environ", "mem", "folder/environ", "root/etc/passwd", "maps", "up/usr/bin/env", "out/os-release", "zero"),
    *("null", "loop", "pipe", "sub", "sub/relative/environ", "sub/pipe", "/etc/passwd", "../proc/self/environ", "."),
)


@pytest.mark.parametrize("path", OUTSIDE)
def test_upload_and_download_follow_no_link_out_of_the_sandbox(box: Box, path: str) -> None:
    async def work() -> None:
        sandbox = await box.sandboxes.create()
        assert (await sandbox.exec(warm(LINKS))).succeeded
        with pytest.raises(OSError, match=r".") as read:
            await sandbox.download(path)
        assert not isinstance(read.value, SandboxFailed)
        with pytest.raises(OSError, match=r".") as written:
            await sandbox.upload(path, b"data")
        assert not isinstance(written.value, SandboxFailed)
        if path not in ("sub", "."):
            with pytest.raises(OSError, match=r"."):
                await sandbox.upload(f"{path}/more/data", b"data")
        assert (await sandbox.exec(warm("print(1)"))).stdout == b"1\n"
        await sandbox.close()

    box.do(work())


def test_sparse_file_is_read_up_to_the_size_of_the_folder(box: Box) -> None:
    async def work() -> None:
        sandbox = await box.sandboxes.create()
        await sandbox.exec(warm(LINKS))
        assert len(await sandbox.download("sparse")) == 8 * MIB
        await sandbox.close()

    box.do(work())


def test_upload_and_download_follow_links_inside_the_folder(box: Box) -> None:
    async def work() -> None:
        sandbox = await box.sandboxes.create()
        await sandbox.exec(warm("os.mkdir('real'); os.symlink('real', 'link')"))
        await sandbox.upload("link/new/data", b"data")
        assert await sandbox.download("real/new/data") == b"data"
        await sandbox.close()

    box.do(work())


def test_sandbox_channel_allows_no_network_and_no_socket_name(box: Box) -> None:
    async def work() -> None:
        ours, theirs = socket.socketpair()
        code = (
            "import fcntl\nc = socket.socket(fileno=3)\nfails(c.bind, '\\0name')\nfails(c.listen)\n"
            "for request in (0x8912, 0x8913, 0x8927, 0x8933, 0x894C, 0x89E0):\n"
            "    fails(fcntl.ioctl, 3, request, bytes(64))\nprint('end')"
        )
        with ours, theirs:
            assert (await box.sandboxes.run(warm(code, channel=theirs))).stdout == b"end\n"

    box.do(work())


def test_sandboxes_see_no_file_or_process_of_each_other(box: Box) -> None:
    async def work() -> None:
        first, second = await box.sandboxes.create(), await box.sandboxes.create()
        code = f"word = '{SECRET}' * 1000\nopen('left', 'w').write(word)\ntime.sleep(600)"
        running = asyncio.create_task(first.exec(warm(code, 2.0)))
        look = (
            "time.sleep(0.3)\nimport glob\n"
            "print(os.listdir('.'), sorted(n for n in os.listdir('/proc') if n.isdigit()))\n"
            "print(len(open('/proc/net/unix').readlines()) - 1, glob.glob('/proc/[0-9]*/root/work/left'))"
        )
        found = await second.exec(warm(look))
        assert found.stdout == b"[] ['1', '2']\n0 []\n"
        assert (await running).end is ProgramEnd.TIMEOUT
        for sandbox in (first, second):
            await sandbox.close()

    box.do(work())


@pytest.mark.parametrize("moment", [0.0, 0.01, 0.1])
def test_cancelled_program_leaves_no_process(box: Box, moment: float) -> None:
    async def work() -> None:
        before = len(list_sandbox_processes())
        sandbox = await box.sandboxes.create()
        running = asyncio.create_task(sandbox.exec(warm("forks(5, lambda: time.sleep(600))\ntime.sleep(600)")))
        await asyncio.sleep(moment)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await sandbox.close()
        async with asyncio.timeout(LONG):
            while len(list_sandbox_processes()) > before:
                await asyncio.sleep(0.02)
        assert (await box.sandboxes.run(warm("print(1)"))).stdout == b"1\n"

    box.do(work())


def test_killed_sandbox_process_breaks_only_its_sandbox(box: Box) -> None:
    async def work() -> None:
        first, second = await box.sandboxes.create(), await box.sandboxes.create()
        running = asyncio.create_task(first.exec(warm("os.write(1, b'x' * 60000); time.sleep(600)")))
        await asyncio.sleep(0.2)
        await _kill(first)
        with pytest.raises(SandboxFailed):
            await running
        assert (await second.exec(warm("print(1)"))).stdout == b"1\n"
        await second.close()

    box.do(work())


async def _kill(sandbox: Sandbox) -> None:
    sandbox._kill()  # type: ignore[attr-defined]


def test_memory_shared_with_a_child_counts_once(box: Box) -> None:
    """A child process shares all memory of its parent until it executes a program. A forked child shares the pages to
    which neither process writes.
    """
    code = (
        "import subprocess\nx = b'x' * (36 << 20)\n"
        "for _ in range(20): subprocess.run(['true'], check=True)\nforks(3, lambda: time.sleep(0.3))\ntime.sleep(0.4)\n"
        "stack = ctypes.create_string_buffer(1 << 16); top = (ctypes.addressof(stack) + (1 << 16) - 64) & ~63\n"
        "libc.clone(ctypes.cast(libc.usleep, ctypes.c_void_p), ctypes.c_void_p(top), 0x100 | 17, 300000)\n"
        "time.sleep(0.2)\nprint(os.wait()[1])"
    )
    found = box.do(box.sandboxes.run(warm(code)))
    assert (found.end, found.stdout) == (ProgramEnd.EXITED, b"0\n")


def test_ended_orphans_do_not_count_towards_the_process_limit(box: Box) -> None:
    code = "for _ in range(40):\n    forks(1, lambda: forks(1, lambda: None))\n    os.wait(); time.sleep(0.03)\n"
    found = box.do(box.sandboxes.run(warm(code + "print('end')")))
    assert (found.end, found.stdout) == (ProgramEnd.EXITED, b"end\n")


def test_sandboxed_program_may_use_sockets_threads_and_commands(box: Box) -> None:
    code = (
        "import asyncio, subprocess, multiprocessing, concurrent.futures as futures\n"
        "async def work():\n    process = await asyncio.create_subprocess_exec('echo', 'a', stdout=-1)\n"
        "    return await process.communicate()\n"
        "print(asyncio.run(work())[0], subprocess.run(['echo', 'b'], capture_output=True).stdout)\n"
        "with futures.ThreadPoolExecutor(4) as pool: print(list(pool.map(abs, range(-3, 0))))\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool: print(pool.map(abs, range(-3, 0)))\n"
        "os.nice(1); os.sched_getaffinity(0); open('/dev/zero', 'rb').read(3)"
    )
    found = box.do(box.sandboxes.run(warm(code)))
    assert (found.end, found.return_code, found.stderr) == (ProgramEnd.EXITED, 0, b"")
    assert found.stdout == b"b'a\\n' b'b\\n'\n[3, 2, 1]\n[3, 2, 1]\n"


def test_program_that_steals_its_output_blocks_no_other_program(box: Box) -> None:
    """If a program reads from the pipe of its own output, the keeper must not wait for bytes that are gone."""
    code = (
        "def steal():\n    fd = os.open('/proc/self/fd/1', os.O_RDONLY | os.O_NONBLOCK)\n    while True:\n"
        "        try: os.read(fd, 65536)\n        except BlockingIOError: pass\n"
        "forks(4, steal)\ntime.sleep(0.2)\nos.write(1, b'x')\ntime.sleep(600)"
    )
    for _ in range(3):
        assert box.do(box.sandboxes.run(warm(code, 0.5))).end is ProgramEnd.TIMEOUT


def test_output_beyond_the_size_of_a_pipe_is_complete(box: Box) -> None:
    code = "os.write(1, b'x' * 90000); os.write(2, b'y' * 90000)"
    found = box.do(box.sandboxes.run(warm(code)))
    assert (found.end, found.return_code) == (ProgramEnd.EXITED, 0)
    assert (found.stdout, found.stderr) == (b"x" * 90000, b"y" * 90000)


def test_program_starts_with_few_objects_to_garbage_collect(box: Box) -> None:
    """A garbage collection would write to all objects, and so copy the memory pages that processes share."""
    found = box.do(box.sandboxes.run(Program(code="import gc; print(gc.isenabled(), len(gc.get_objects()))")))
    enabled, count = found.stdout.split()
    assert (enabled, int(count) < 100) == (b"True", True)


def test_seccomp_filter_lists_each_system_call_once() -> None:
    """If the number of a system call occurs twice for one machine, one of the two entries is wrong."""
    from rollflow.tasks.sandboxes.box.rights import REFUSED

    for column in (0, 1):
        numbers = [entry[column] for entry in REFUSED.values() if entry[column] is not None]
        assert len(numbers) == len(set(numbers))


def test_sandbox_that_a_program_breaks_is_reported_as_failed(box: Box) -> None:
    """If the keeper cannot continue, it sends the reason, which must not count as the result of the program."""

    async def work() -> None:
        sandbox = await box.sandboxes.create()
        sandbox._receive = lambda: _answer({"broken": "no descriptors"})  # type: ignore[method-assign]
        with pytest.raises(SandboxFailed, match="no descriptors"):
            await sandbox.exec(warm("print(1)"))
        await sandbox.close()

    box.do(work())


async def _answer(header: dict[str, str]) -> tuple[dict[str, str], bytes]:
    return header, b""


def test_child_processes_at_the_limit_block_no_later_program(box: Box) -> None:
    """Otherwise a program could make its sandbox fail, and so prevent the programs that run after it."""

    async def work() -> None:
        sandbox = await box.sandboxes.create()
        fill = (
            "def fill():\n    while True:\n        try: forks(1, lambda: time.sleep(600))\n"
            "        except OSError: time.sleep(0.01)\nforks(1, fill)"
        )
        await sandbox.exec(Program(code=PRELUDE + fill, timeout=LONG, keep_children=True))
        await asyncio.sleep(0.3)
        for _ in range(2):
            found = await sandbox.exec(Program(code="print(1)", timeout=LONG, keep_children=True))
            assert (found.end, found.stdout) == (ProgramEnd.EXITED, b"1\n")
        await sandbox.close()

    box.do(work())


def test_child_that_kills_the_next_program_breaks_no_sandbox(box: Box) -> None:
    """The next program ends by a signal, because a child process of an earlier program kills it. This is not a failure
    of the sandbox.
    """

    async def work() -> None:
        sandbox = await box.sandboxes.create()
        kill = "def kill():\n    while True:\n        try: os.kill(-1, 9)\n        except OSError: pass\nforks(1, kill)"
        await sandbox.exec(Program(code=PRELUDE + kill, timeout=LONG, keep_children=True))
        for _ in range(10):
            found = await sandbox.exec(Program(code="print(1)", timeout=LONG, keep_children=True))
            assert (found.end, found.return_code) in ((ProgramEnd.EXITED, -9), (ProgramEnd.EXITED, 0))
        await sandbox.close()

    box.do(work())
