"""Tests the contract of sandboxes on every kind of sandbox that this machine can run.

The tests share the sandboxes of a kind. `test_sandbox_ends.py` has the tests that end all sandboxes of a kind.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rollflow.tasks.sandboxes.base import Capability, Program, ProgramEnd, Sandboxes, SandboxFailed, UserRefused
from rollflow.tasks.sandboxes.rock import RockSandboxes
from tests.support.sandbox_kinds import KINDS, LONG, SMALL, skip_without, start_kind, wait_until, warm
from tests.support.sandbox_processes import list_sandbox_processes

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[Sandboxes]:
    """Start sandboxes of one kind for all tests of the module; skip a kind that this machine cannot run."""
    async with start_kind(request.param) as started:
        yield started


@pytest.fixture
def sandboxes(request: pytest.FixtureRequest, shared: Sandboxes) -> Sandboxes:
    """Return sandboxes of one kind; skip a kind without the capability that the test needs."""
    skip_without({capability for mark in request.node.iter_markers("needs") for capability in mark.args}, shared)
    return shared


async def test_warm_program_returns_output_and_exit_code(sandboxes: Sandboxes) -> None:
    code = "import sys; print('out', sys.argv[1], sys.stdin.read()); print('err', file=sys.stderr); sys.exit(3)"
    found = await sandboxes.run(warm(code, arguments=["one"], stdin=b"in"))
    assert (found.end, found.return_code) == (ProgramEnd.EXITED, 3)
    assert (found.stdout, found.stderr) == (b"out one in\n", b"err\n")


async def test_command_gets_variables_folder_and_files(sandboxes: Sandboxes) -> None:
    command = ["sh", "-c", 'echo $WORD; test "$(pwd)" = "$HOME/inner" && echo inner; cat ../data.txt']
    program = Program(command=command, env={"WORD": "hello"}, cwd="inner", timeout=LONG)
    found = await sandboxes.run(program, {"data.txt": b"data", "inner/x": b""})
    assert found.stdout == b"hello\ninner\ndata"
    assert found.succeeded


async def test_traceback_begins_with_the_lines_of_the_program(sandboxes: Sandboxes) -> None:
    found = await sandboxes.run(warm("def f():\n    return 1 / 0\nf()", name="answer.py"))
    assert found.return_code == 1
    lines = found.stderr.decode().splitlines()
    assert lines[1] == '  File "answer.py", line 3, in <module>'
    assert lines[-1] == "ZeroDivisionError: division by zero"


async def test_exit_functions_and_threads_run_to_their_end(sandboxes: Sandboxes) -> None:
    code = (
        "import atexit, threading, time\natexit.register(print, 'exit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\nprint('main')"
    )
    assert (await sandboxes.run(warm(code))).stdout == b"main\nthread\nexit\n"


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("while True: pass", ProgramEnd.TIMEOUT),
        ("import time; time.sleep(600)", ProgramEnd.TIMEOUT),
        ("while True: print('x' * 10000)", ProgramEnd.OUTPUT),
        ("import os\nfor _ in range(2): os.fork()\nx = b'x' * (50 << 20)\nwhile True: pass", ProgramEnd.MEMORY),
    ],
    ids=["loop", "sleep", "output", "memory of several processes"],
)
async def test_program_over_a_limit_is_killed(sandboxes: Sandboxes, code: str, end: ProgramEnd) -> None:
    limit = 0.5 if end is ProgramEnd.TIMEOUT else LONG
    found = await sandboxes.run(Program(code=code, timeout=limit))
    named = end is ProgramEnd.TIMEOUT or Capability.NAMED_LIMITS in sandboxes.capabilities
    assert found.end in ((end,) if named else (end, ProgramEnd.EXITED))
    assert found.return_code == -9
    assert len(found.stdout) <= SMALL["output_bytes"]


async def test_one_process_cannot_take_more_memory(sandboxes: Sandboxes) -> None:
    found = await sandboxes.run(warm("x = []\nwhile True: x.append(bytearray(1 << 20))"))
    assert found.end is ProgramEnd.MEMORY or b"MemoryError" in found.stderr or b"limit" in found.stderr


async def test_fork_bomb_stays_below_the_process_limit(sandboxes: Sandboxes) -> None:
    code = (
        "import os, time\ncount = 1\ntry:\n    while True:\n        if os.fork() == 0: time.sleep(600)\n"
        "        count += 1\nexcept OSError: print(count)"
    )
    found = await sandboxes.run(warm(code))
    assert found.end is ProgramEnd.PROCESSES or b"limit" in found.stderr or int(found.stdout) <= 17


@pytest.mark.needs(Capability.EXACT_FOLDER_LIMIT)
async def test_program_cannot_exceed_the_limits_of_its_folder(sandboxes: Sandboxes) -> None:
    many = (
        "n = 0\ntry:\n    while True:\n        open(f'f{n}', 'w').close(); n += 1\nexcept OSError as e: print(e.errno)"
    )
    assert int((await sandboxes.run(warm(many))).stdout) == errno.ENOSPC
    large = (
        "n = 0\ntry:\n    while True:\n        open(f'f{n}', 'wb').write(bytes(1 << 20)); n += 1\n"
        "except OSError as e: print(n)"
    )
    assert int((await sandboxes.run(warm(large))).stdout) <= 8


async def test_program_that_fills_its_folder_is_stopped(sandboxes: Sandboxes) -> None:
    large = "import itertools\nfor n in itertools.count():\n    open(f'f{n}', 'wb').write(bytes(1 << 20))"
    many = "import itertools\nfor n in itertools.count():\n    open(f'f{n}', 'w').close()"
    for code in (large, many):
        found = await sandboxes.run(warm(code))
        assert found.end is ProgramEnd.FOLDER or b"No space left" in found.stderr


@pytest.mark.needs(Capability.ISOLATION)
async def test_program_reads_no_host_file(sandboxes: Sandboxes, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    code = (
        f"import os\nfor path in ({str(tmp_path / 'secret')!r}, '/proc/1/environ', '/etc/passwd'):\n"
        "    try: print(open(path).read())\n    except OSError: print('refused')\n"
        f"try: open({str(tmp_path / 'new')!r}, 'w')\nexcept OSError: print('refused')\n"
        f"try: os.listdir({str(tmp_path)!r})\nexcept OSError: print('refused')\n"
        f"try: os.kill({os.getpid()}, 0)\nexcept OSError: print('refused')"
    )
    assert (await sandboxes.run(warm(code))).stdout == b"refused\n" * 6
    assert not (tmp_path / "new").exists()


@pytest.mark.needs(Capability.ISOLATION)
async def test_program_changes_no_file_outside_its_sandbox(sandboxes: Sandboxes, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    before, limits = (tmp_path / "file").stat(), resource.getrlimit(resource.RLIMIT_NOFILE)
    path = str(tmp_path / "file")
    attempts = (
        *(f"os.chmod({path!r}, 0)", f"os.chown({path!r}, 1, 1)", f"os.utime({path!r}, (1, 1))", f"os.unlink({path!r})"),
        *(f"os.truncate({path!r}, 0)", f"os.rename({path!r}, 'here')", f"os.link({path!r}, 'here')"),
        "os.fchmod(os.open(os.path.realpath(sys.executable), os.O_RDONLY), 0o755)",
        f"resource.prlimit({os.getpid()}, resource.RLIMIT_NOFILE, (99, 99))",
        f"os.setpriority(os.PRIO_PROCESS, {os.getpid()}, 5)",
    )
    tries = "".join(f"try: {attempt}; print({attempt!r})\nexcept OSError: pass\n" for attempt in attempts)
    found = await sandboxes.run(warm(f"import os, resource, sys\n{tries}print('end')"))
    assert found.stdout == b"end\n", found
    after = (tmp_path / "file").stat()
    assert (after.st_mode, after.st_uid, after.st_mtime) == (before.st_mode, before.st_uid, before.st_mtime)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == limits


@pytest.mark.needs(Capability.ISOLATION)
async def test_program_reaches_no_network(sandboxes: Sandboxes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = (
            f"import socket\ntry: socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)\n"
            "except OSError: print('refused')"
        )
        assert (await sandboxes.run(warm(code))).stdout == b"refused\n"


@pytest.mark.needs(Capability.ISOLATION, Capability.HIDDEN_HOST)
async def test_program_sees_no_host_file_or_process(sandboxes: Sandboxes, tmp_path: Path) -> None:
    code = (
        f"import os, json\nprint(json.dumps([os.path.exists({str(tmp_path)!r}), os.path.exists({os.getcwd()!r}),\n"
        "    sorted(os.listdir('/proc'))[:3]]))"
    )
    seen = json.loads((await sandboxes.run(warm(code))).stdout)
    assert seen[:2] == [False, False]
    assert seen[2][:2] == ["1", "2"]


async def test_long_input_is_read_to_its_end(sandboxes: Sandboxes) -> None:
    if isinstance(sandboxes, RockSandboxes):
        pytest.skip("ROCK's protocol has no input, so the client writes the input to a file in the sandbox")
    code = "import sys; print(len(sys.stdin.buffer.read()))"
    size = SMALL["folder_bytes"] + 1000
    assert int((await sandboxes.run(warm(code, stdin=bytes(size)))).stdout) == size


async def test_programs_leave_nothing_for_each_other(sandboxes: Sandboxes) -> None:
    write = "import json, builtins\nbuiltins.left = 1\njson.left = 1\nopen('left', 'w').close()"
    read = "import json, os, builtins\nprint(hasattr(builtins, 'left'), hasattr(json, 'left'), os.listdir('.'))"
    assert (await sandboxes.run(warm(write))).succeeded
    assert (await sandboxes.run(warm(read))).stdout == b"False False []\n"


@pytest.mark.needs(Capability.STATE)
async def test_child_that_leaves_its_session_is_killed(sandboxes: Sandboxes) -> None:
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(6789)\n"
        "    os._exit(0)\nprint('done')"
    )
    before = len(list_sandbox_processes())
    sandbox = await sandboxes.create()
    idle = len(list_sandbox_processes())
    assert (await sandbox.exec(warm(code))).stdout == b"done\n"
    assert len(list_sandbox_processes()) <= idle
    await sandbox.close()
    await wait_until(lambda: len(list_sandbox_processes()) <= before)


@pytest.mark.needs(Capability.STATE)
async def test_files_are_uploaded_kept_and_downloaded(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.create()
    await sandbox.upload("in/data", bytes(range(256)) * 1000)
    assert (await sandbox.exec(warm("open('out', 'wb').write(open('in/data', 'rb').read()[::-1])"))).succeeded
    assert await sandbox.download("out") == (bytes(range(256)) * 1000)[::-1]
    with pytest.raises(FileNotFoundError):
        await sandbox.download("none")
    await sandbox.exec(warm("import os; os.mkfifo('pipe'); os.symlink('/proc/1/environ', 'link')"))
    for name in ("pipe", "link", "in"):
        with pytest.raises(OSError, match=r"Invalid|Permission|directory|symbolic"):
            await sandbox.download(name)
    await sandbox.close()


@pytest.mark.needs(Capability.CHILDREN)
async def test_child_processes_continue_if_the_sandbox_allows_it(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.create()
    start = Program(command=["sh", "-c", "sleep 600 & echo $!"], keep_children=True, timeout=LONG)
    number = (await sandbox.exec(start)).stdout.strip().decode()
    look = Program(command=["sh", "-c", f"test -d /proc/{number}"], keep_children=True, timeout=LONG)
    assert (await sandbox.exec(look)).succeeded
    assert (await sandbox.exec(Program(command=["true"], timeout=LONG))).succeeded
    assert not (await sandbox.exec(look)).succeeded
    await sandbox.close()


@pytest.mark.needs(Capability.CHANNEL)
async def test_program_sends_and_receives_through_its_channel(sandboxes: Sandboxes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        code = "import socket\nwith socket.socket(fileno=3) as c: c.sendall(c.recv(100).upper())"
        running = asyncio.create_task(sandboxes.run(warm(code, channel=theirs)))
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(ours, b"hello")
        assert await asyncio.wait_for(loop.sock_recv(ours, 100), LONG) == b"HELLO"
        assert (await running).succeeded


async def test_closed_sandbox_runs_no_program_and_others_do(sandboxes: Sandboxes) -> None:
    first, second = await sandboxes.create(), await sandboxes.create()
    await first.close()
    with pytest.raises(SandboxFailed):
        await first.exec(warm("pass"))
    assert (await second.exec(warm("pass"))).succeeded
    await second.close()


async def test_cancelled_program_is_killed(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.create()
    running = asyncio.create_task(sandbox.exec(warm("import time; time.sleep(600)")))
    await asyncio.sleep(0.3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(SandboxFailed):
        await sandbox.exec(warm("pass"))
    await sandbox.close()


async def test_program_draws_the_same_random_numbers_each_time(sandboxes: Sandboxes) -> None:
    program = warm("import random; print(random.random(), hash('x'))")
    assert (await sandboxes.run(program)).stdout == (await sandboxes.run(program)).stdout


async def test_user_that_a_sandbox_does_not_have_is_refused(sandboxes: Sandboxes) -> None:
    """The program does not start, and the sandbox remains usable."""
    reason = "the sandbox has no such user" if Capability.USERS in sandboxes.capabilities else "run as one user"
    with pytest.raises(UserRefused, match=f"user = 'someone': .*{reason}"):
        await sandboxes.run(warm("print(1)", user="someone"))
    sandbox = await sandboxes.create()
    with pytest.raises(UserRefused, match=reason):
        await sandbox.exec(warm("print(1)", user="someone"))
    assert (await sandbox.exec(warm("print(2)"))).stdout == b"2\n"
    await sandbox.close()


@pytest.mark.needs(Capability.SESSIONS)
async def test_session_of_an_unknown_user_is_refused(sandboxes: Sandboxes) -> None:
    workspace = await sandboxes.open_workspace()
    with pytest.raises(UserRefused, match="user = 'someone'"):
        await workspace.open_session(user="someone")
    with pytest.raises(UserRefused, match="user = 'someone'"):
        await workspace.exec(Program(command=["true"], user="someone"))
    assert (await workspace.exec(Program(command=["true"], timeout=LONG))).succeeded
    await workspace.close()


@pytest.mark.needs(Capability.USERS)
@pytest.mark.parametrize("name", ["-c", "a b", "a;b", "", "a" * 40, "../x", "x\n"])
async def test_invalid_user_name_is_not_sent_to_the_server(sandboxes: Sandboxes, name: str) -> None:
    sandbox = await sandboxes.create()
    if name:
        with pytest.raises(UserRefused, match="not a valid name of a user"):
            await sandbox.exec(warm("print(1)", user=name))
    else:
        assert (await sandbox.exec(warm("print(1)", user=name))).succeeded
    await sandbox.close()


@pytest.mark.needs(Capability.USERS)
async def test_user_id_of_the_sandbox_user_is_accepted(sandboxes: Sandboxes) -> None:
    found = await sandboxes.run(warm("import os, sys; print(os.getuid(), sys.stdin.read())", user="1000", stdin=b"in"))
    assert found.stdout == b"1000 in\n"
    workspace = await sandboxes.open_workspace()
    session = await workspace.open_session(user="1000")
    assert (await session.run("id -u")).output.strip() == b"1000"
    await workspace.close()
