"""Tests the contract of workspaces and their sessions, on every kind of sandbox that supports sessions on this
machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from rollflow.tasks.sandboxes.base import (
    Capability,
    Program,
    ProgramEnd,
    Sandboxes,
    SandboxFailed,
    SessionKind,
    Workspace,
)
from rollflow.tasks.sandboxes.workspace import BoxWorkspace
from tests.support.sandbox_kinds import KINDS, LONG, SMALL, start_kind
from tests.support.sandbox_processes import list_sandbox_processes

SOON = 0.5  # deadline, in seconds, of a program that never ends

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[kind for kind in KINDS if kind != "run-code"])
async def sandboxes(request: pytest.FixtureRequest) -> AsyncIterator[Sandboxes]:
    """Start sandboxes of one kind with sessions; skip a kind that this machine cannot run."""
    async with start_kind(request.param, {Capability.SESSIONS}) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def workspace(sandboxes: Sandboxes) -> AsyncIterator[Workspace]:
    """Open a workspace."""
    opened = await sandboxes.open_workspace()
    yield opened
    await opened.close()


async def test_shell_session_keeps_its_state_between_commands(workspace: Workspace) -> None:
    shell = await workspace.open_session(env={"GIVEN": "given"})
    assert (await shell.run("x=5; mkdir d; cd d; f() { echo $x $GIVEN; }", LONG)).output == b""
    found = await shell.run("f; basename $PWD; echo err >&2; false", LONG)
    assert (found.end, found.return_code, found.lost) == (ProgramEnd.EXITED, 1, "")
    assert found.output.split() == [b"5", b"given", b"d", b"err"]
    assert (await shell.run("echo $?\n\n# a comment\nif true; then echo two; fi", LONG)).output.split() == [
        b"1",
        b"two",
    ]
    assert (await shell.run("echo 'not closed", LONG)).return_code != 0
    assert (await shell.run("cat; read line; echo $x", LONG)).output.split() == [b"5"]  # the input is empty


async def test_python_session_keeps_its_state_between_commands(workspace: Workspace) -> None:
    python = await workspace.open_session(SessionKind.PYTHON)
    assert (await python.run("import math\ndef f(x): return x * 2\ny = f(4)", LONG)).output == b""
    assert (await python.run("print('printed')\nmath.sqrt(y * 2)", LONG)).output.split() == [b"printed", b"4.0"]
    found = await python.run("def g(): return 1 / 0\ng()", LONG)
    assert found.return_code == 1
    assert found.output.decode().splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert (await python.run("raise SystemExit(3)", LONG)).return_code == 3
    assert (await python.run("import os\nif os.fork() == 0: print('child')", LONG)).lost == ""
    assert b"8" in (await python.run("y", LONG)).output.split()  # the child may print before or after it


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (SessionKind.SHELL, "sleep 600; echo never"),
        (SessionKind.SHELL, "while :; do :; done"),
        (SessionKind.PYTHON, "import time; time.sleep(600)"),
    ],
)
async def test_command_over_its_time_limit_keeps_the_session(
    workspace: Workspace, kind: SessionKind, code: str
) -> None:
    session = await workspace.open_session(kind)
    assert (await session.run("x=5", LONG)).lost == ""
    found = await session.run(code, SOON)
    assert (found.end, found.lost) == (ProgramEnd.TIMEOUT, "")
    assert b"never" not in found.output
    shown = await session.run("echo $x" if kind is SessionKind.SHELL else "x", LONG)
    assert shown.output.strip() == b"5"


async def test_session_that_does_not_stop_is_replaced(workspace: Workspace) -> None:
    python = await workspace.open_session(SessionKind.PYTHON)
    stubborn = "x = 5\nimport signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    found = await python.run(stubborn, SOON)
    assert found.end is ProgramEnd.TIMEOUT
    assert found.lost
    assert (await python.run("'x' in globals()", LONG)).output.strip() == b"False"


async def test_session_continues_after_an_exception_without_traceback(workspace: Workspace) -> None:
    python = await workspace.open_session(SessionKind.PYTHON)
    found = await python.run("x = 5\nclass Odd(Exception):\n    with_traceback = None\nraise Odd('mine')", LONG)
    assert (found.return_code, found.lost) == (1, "")
    assert b"mine" in found.output
    assert (await python.run("x", LONG)).output.strip() == b"5"


async def test_session_that_ends_itself_is_replaced(workspace: Workspace) -> None:
    shell = await workspace.open_session()
    found = await shell.run("x=5; touch kept; exit 7", LONG)
    assert found.return_code == 7
    assert "ended" in found.lost
    assert (await shell.run("echo ${x-none}; ls", LONG)).output.split() == [b"none", b"kept"]


async def test_output_of_a_session_is_limited(workspace: Workspace) -> None:
    shell = await workspace.open_session()
    found = await shell.run("while :; do echo 0123456789; done", LONG)
    assert (found.end, found.lost) == (ProgramEnd.OUTPUT, "")
    assert len(found.output) <= SMALL["output_bytes"]
    assert (await shell.run("echo $((6 * 7))", LONG)).output.split()[-1] == b"42"


async def test_memory_limit_ends_sessions_but_keeps_files(workspace: Workspace) -> None:
    python, shell = await workspace.open_session(SessionKind.PYTHON), await workspace.open_session()
    await shell.run("x=5; echo kept > file", LONG)
    found = await python.run("x = []\nwhile True: x.append(bytearray(1 << 20))", LONG)
    assert found.end is ProgramEnd.MEMORY or b"MemoryError" in found.output
    if found.end is ProgramEnd.MEMORY:
        assert "memory" in found.lost
        assert (await shell.run("echo ${x-none}", LONG)).output.strip() == b"none"
    assert await workspace.download("file") == b"kept\n"


async def test_commands_files_and_sessions_can_be_used_concurrently(workspace: Workspace) -> None:
    shell, other = await workspace.open_session(), await workspace.open_session()
    waiting = asyncio.create_task(shell.run("while ! test -e go; do sleep 0.01; done; cat go", LONG))
    assert (await other.run("echo other", LONG)).output.strip() == b"other"
    command = ["sh", "-c", "cat; echo $WORD; echo err >&2; exit 3"]
    found = await workspace.exec(Program(command=command, stdin=b"in ", env={"WORD": "w"}, timeout=LONG))
    assert (found.return_code, found.stdout, found.stderr) == (3, b"in w\n", b"err\n")
    assert (await workspace.exec(Program(command=["sleep", "600"], timeout=SOON))).end is ProgramEnd.TIMEOUT
    assert (await workspace.exec(Program(command=["no-such-command"], timeout=LONG))).return_code == 127
    await workspace.upload("go", b"gone")
    assert (await waiting).output == b"gone"
    assert await workspace.is_alive()


@pytest.mark.parametrize("kind", SessionKind)
async def test_session_continues_after_a_cancelled_command(workspace: Workspace, kind: SessionKind) -> None:
    """If a caller stops waiting for its code, the code is interrupted, and the session keeps its state."""
    is_shell = kind is SessionKind.SHELL
    session = await workspace.open_session(kind)
    await session.run("x=5" if is_shell else "x = 5", LONG)
    seconds = 5 if isinstance(workspace, BoxWorkspace) else 2  # a server waits for the end of the code
    shell = f"touch begun; sleep {seconds}; touch ended"
    python = f"import os, time; open('begun', 'w').close(); time.sleep({seconds}); open('ended', 'w').close()"
    for _ in range(2):
        running = asyncio.create_task(session.run(shell if is_shell else python, LONG))
        async with asyncio.timeout(LONG):
            while not (await workspace.exec(Program(command=["test", "-e", "begun"], timeout=LONG))).succeeded:
                await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        found = await session.run("echo $x; rm begun" if is_shell else "print(x); os.remove('begun')", LONG)
        assert (found.output.split()[-1], found.lost) == (b"5", "")
        ended = await workspace.exec(Program(command=["test", "-e", "ended"], timeout=LONG))
        # a shell that is interrupted between two commands runs the second one
        assert is_shell or not (ended.succeeded and isinstance(workspace, BoxWorkspace))


async def test_session_closes_after_a_cancelled_command(workspace: Workspace) -> None:
    session = await workspace.open_session()
    await session.run("x=5", LONG)
    running = asyncio.create_task(session.run("trap '' INT; touch begun; sleep 600", 2.0))
    async with asyncio.timeout(LONG):
        while not (await workspace.exec(Program(command=["test", "-e", "begun"], timeout=LONG))).succeeded:
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await session.close()
    assert await workspace.is_alive()


async def test_background_process_survives_the_end_of_a_command(workspace: Workspace) -> None:
    shell = await workspace.open_session()
    await shell.run("(sleep 0.3; echo late > late) & disown", LONG)
    found = await shell.run("while ! test -s late; do sleep 0.01; done; cat late", LONG)
    assert found.output.split()[-1] == b"late"


async def test_killed_session_process_is_reported_and_replaced(workspace: Workspace) -> None:
    shell = await workspace.open_session()
    await shell.run("echo kept > file", LONG)
    found = await shell.run("kill -9 $PPID; sleep 600", LONG)
    assert (found.end, found.return_code) == (ProgramEnd.EXITED, -9)
    assert found.lost
    assert (await shell.run("cat file", LONG)).output.strip() == b"kept"
    command = ["sh", "-c", "kill -9 $(cut -d' ' -f4 /proc/$$/stat 2>/dev/null || echo $PPID); sleep 600"]
    assert not (await workspace.exec(Program(command=command, timeout=LONG))).succeeded
    assert await workspace.is_alive()


async def test_closed_workspace_leaves_no_process(sandboxes: Sandboxes) -> None:
    before = len(list_sandbox_processes())
    workspace = await sandboxes.open_workspace()
    shell, python = await workspace.open_session(), await workspace.open_session(SessionKind.PYTHON)
    await shell.run("setsid sleep 600 & sleep 600 &", LONG)
    running = asyncio.create_task(python.run("import time; time.sleep(600)", LONG))
    await asyncio.sleep(0.3)
    await workspace.close()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    async with asyncio.timeout(2 * LONG):  # on a slow disk, deleting the sandbox's folder takes a long time
        while len(list_sandbox_processes()) > before:
            await asyncio.sleep(0.02)
    with pytest.raises(SandboxFailed):
        await shell.run("echo", LONG)
    with pytest.raises(SandboxFailed):
        await workspace.download("file")


async def test_special_file_or_path_outside_the_workspace_is_refused(workspace: Workspace) -> None:
    shell = await workspace.open_session()
    await shell.run("ln -s /proc/self/mem memory; ln -s /proc/self/environ environ; mkfifo pipe; mkdir folder", LONG)
    for path in ("memory", "environ", "pipe", "folder", "/proc/1/environ", "none", "../../../x"):
        with pytest.raises(OSError, match=r"\S") as failed:
            await workspace.download(path)
        assert not isinstance(failed.value, SandboxFailed)
    for path in ("memory", "pipe", "folder", "/proc/self/oom_score_adj"):
        with pytest.raises(OSError, match=r"\S"):
            await workspace.upload(path, b"1")
    await workspace.upload("new/file", bytes(range(256)))
    assert await workspace.download("new/file") == bytes(range(256))
    assert (await shell.run("echo alive", LONG)).output.strip() == b"alive"
