"""Tests rollflow's server with the unmodified SDK of ROCK, and rollflow's client with a stock rocklet in bubblewrap.

The tests need an environment with `pip install "rl-rock[rocklet]==1.11.0"`, whose Python ROLLFLOW_ROCK_PYTHON names.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Outcome
from rollflow.tasks.sandboxes import build_sandboxes
from rollflow.tasks.sandboxes.base import Program, ProgramEnd, SandboxFailed, SessionKind, UserRefused
from rollflow.tasks.sandboxes.config import BubblewrapSandbox, RockSandbox
from rollflow.tasks.scorers.code.scorer import CodeScorer
from rollflow.tasks.scorers.config import CodeReward
from tests.support.sandbox_server import serve_in_background

LONG = 120.0
PYTHON = os.environ.get("ROLLFLOW_ROCK_PYTHON", "")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not PYTHON, reason="ROLLFLOW_ROCK_PYTHON names no Python with rl-rock[rocklet] 1.11.0"),
]

SDK = """
import asyncio, json, logging, sys
logging.disable(logging.CRITICAL)
from rock.actions import *
from rock.sdk.sandbox.client import RunMode, Sandbox
from rock.sdk.sandbox.config import SandboxConfig

async def main(url, token, source):
    config = SandboxConfig(base_url=url, memory="200m", cpus=1, extra_headers={"X-Key": token})
    box, found = Sandbox(config), {}
    await box.start()
    found["alive"] = (await box.is_alive()).is_alive
    done = await box.execute(Command(command=["sh", "-c", "echo out; echo err >&2; exit 4"]))
    found["execute"] = [done.stdout, done.stderr, done.exit_code]
    found["late"] = (await box.execute(Command(command=["sleep", "60"], timeout=1))).exit_code
    await box.create_session(CreateBashSessionRequest(session="s", env={"A": "b"}))
    await box.arun("export X=7; cd /tmp", session="s")
    found["state"] = (await box.arun("echo $X $A; pwd", session="s")).output.split()
    try:
        await box.arun("ls /nothing", session="s")
    except Exception as error:
        found["failure"] = "exit code 2" in str(error)
    uploaded = await box.upload(UploadRequest(source_path=source, target_path="/tmp/in/file"))
    found["upload"] = [uploaded.success, (await box.arun("wc -c < /tmp/in/file", session="s")).output]
    written = await box.write_file(WriteFileRequest(content="h\\u00e9llo\\n", path="/tmp/w.txt"))
    found["files"] = [written.success, (await box.read_file(ReadFileRequest(path="/tmp/w.txt"))).content]
    command = "sh -c 'sleep 1; echo done'"
    done = await box.arun(command, session="s", mode=RunMode.NOHUP, wait_timeout=60, wait_interval=5)
    found["nohup"] = [done.output, done.exit_code]
    found["nohup alone"] = (await box.arun("echo alone", mode="nohup", wait_timeout=60)).output
    await box.restart()
    await box.close_session(CloseSessionRequest(session=(await session(box))))
    other = Sandbox(config)
    await other.attach(box.sandbox_id)
    await box.stop()
    status = await box.get_status(include_all_states=True)
    found["stopped"] = [status.state.value, status.is_alive]
    await box.delete()
    try:
        await Sandbox(SandboxConfig(base_url=url)).start()
    except Exception as error:
        found["no token"] = "401" in str(error)
    print(json.dumps(found))

async def session(box):
    await box.create_session(CreateBashSessionRequest(session="t"))
    return "t"

asyncio.run(main(*sys.argv[1:]))
"""


async def run_sdk(*arguments: str) -> str:
    """Run the script `SDK` in the environment of ROCK, and return what it prints."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(PYTHON, "-c", SDK, *arguments, stdout=pipe, stderr=pipe)
    stdout, stderr = await asyncio.wait_for(process.communicate(), LONG)
    assert process.returncode == 0, stderr.decode()[-3000:]
    return stdout.decode()


async def test_our_server_answers_the_unmodified_rock_sdk(tmp_path: Path) -> None:
    sandboxes = build_sandboxes(BubblewrapSandbox(spares=0))
    try:
        await sandboxes.start()
    except ConfigError as error:
        pytest.skip(str(error))
    (tmp_path / "source").write_bytes(bytes(range(256)))
    try:
        async with serve_in_background(sandboxes, token="secret") as url:
            found = json.loads(await run_sdk(url, "secret", str(tmp_path / "source")))
    finally:
        await sandboxes.close()
    assert found == {
        "alive": True,
        "execute": ["out\n", "err\n", 4],
        "late": -1,
        "state": ["7", "b", "/tmp"],
        "failure": True,
        "upload": [True, "256"],
        "files": [True, "h\u00e9llo\n"],
        "nohup": ["done", 0],
        "nohup alone": "alone",
        "stopped": ["stopped", False],
        "no token": True,
    }


PAM = ("/etc/pam.d", "/etc/security", "/etc/login.defs")  # files of `su`, by which a rocklet changes the user
USERS = "root:*:0:0::/root:/bin/bash\nagent:*:1001:1001::/tmp/work:/bin/bash\nother:*:1002:1002::/tmp/work:/bin/bash\n"


@asynccontextmanager
async def start_rocklet(passwd: str = "/etc/passwd") -> AsyncIterator[str]:
    """Start a rocklet in bubblewrap, which shares only the network with this machine; yield its address."""
    if (bwrap := shutil.which("bwrap")) is None:
        pytest.skip("there is no bwrap")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environment = Path(PYTHON).parent.parent
    base = Path(PYTHON).resolve().parent.parent
    options = ["--unshare-ipc", "--unshare-pid", "--unshare-uts", "--die-with-parent", "--clearenv"]
    options += ["--perms", "0755", "--dir", "/etc", "--perms", "1777", "--dir", "/tmp"]  # open to every user
    for path in ("/usr", str(base), str(environment), "/etc/ssl", "/etc/ld.so.cache", *PAM):
        options += ["--ro-bind", path, path] if os.path.exists(path) else []
    options += ["--ro-bind", passwd, "/etc/passwd"]
    for name in ("bin", "sbin", "lib", "lib64"):
        options += ["--symlink", f"usr/{name}", f"/{name}"]
    options += ["--dev", "/dev", "--proc", "/proc", "--dir", "/tmp/work", "--tmpfs", "/data", "--tmpfs", "/var"]
    options += ["--setenv", "PATH", f"{environment}/bin:/usr/bin:/bin", "--setenv", "HOME", "/tmp/work"]
    command = [bwrap, *options, "--chdir", "/tmp/work", PYTHON, f"{environment}/bin/rocklet"]
    none = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *command, "--host", "127.0.0.1", "--port", str(port), stdout=none, stderr=none
    )
    try:
        async with httpx.AsyncClient() as client:
            for _ in range(600):
                try:
                    if (await client.get(f"http://127.0.0.1:{port}/is_alive")).json()["is_alive"]:
                        break
                except httpx.TransportError:
                    await asyncio.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


async def test_stock_rocklet_runs_programs_and_sessions() -> None:
    async with start_rocklet() as url:
        config = RockSandbox(url=url, protocol="rocklet", tries=2)
        sandboxes = build_sandboxes(config)
        await sandboxes.start()
        code = "import os, sys; print(sys.argv[1], sys.stdin.read(), os.listdir()); sys.exit(3)"
        found = await sandboxes.run(Program(code=code, arguments=["one"], stdin=b"in", timeout=30), {"a": b""})
        assert (found.stdout, found.return_code) == (b"one in ['a']\n", 3)
        for endless in ("while True: pass", "import os, time; os.kill(os.getppid(), 9); time.sleep(60)"):
            assert (await sandboxes.run(Program(code=endless, timeout=1))).end is ProgramEnd.TIMEOUT
        workspace = await sandboxes.open_workspace()
        await workspace.upload("bytes", bytes(range(256)) * 100)
        assert await workspace.download("bytes") == bytes(range(256)) * 100
        shell = await workspace.open_session()
        await shell.run("x=5")
        assert (await shell.run("echo $x; wc -c < bytes")).output.split() == [b"5", b"25600"]
        late = await shell.run("sleep 60", 1)
        assert late.end is ProgramEnd.TIMEOUT
        assert late.lost
        assert (await shell.run("echo ${x-none}")).output.split() == [b"none"]
        with pytest.raises(SandboxFailed, match="python"):
            await workspace.open_session(SessionKind.PYTHON)
        await workspace.close()
        await sandboxes.close()
        scorer = CodeScorer(CodeReward(case_seconds=2.0, fenced=False, sandbox=config))
        case = {"cases": [{"call": "f", "args": [20], "expected": 42}]}
        for program, outcome in (("lambda x: 2 * x + 2", Outcome.CORRECT), ("lambda x: x", Outcome.WRONG)):
            assert (await scorer.score(f"f = {program}", case)).outcome is outcome
        await scorer.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_stock_rocklet_runs_programs_of_several_users(tmp_path: Path) -> None:
    (tmp_path / "passwd").write_text(USERS)
    async with start_rocklet(str(tmp_path / "passwd")) as url:
        sandboxes = build_sandboxes(RockSandbox(url=url, protocol="rocklet", tries=2))
        await sandboxes.start()
        workspace = await sandboxes.open_workspace()
        free = {"PATH": "/usr/bin:/bin"}  # folders with a Python interpreter that every user can read
        write = "import os, sys; os.umask(0o077); open('secret', 'w').write(sys.stdin.read()); print(os.getuid())"
        found = await workspace.exec(Program(code=write, stdin=b"mine", user="agent", env=free, timeout=30))
        assert (found.stdout, found.stderr) == (b"1001\n", b"")
        read = Program(command=["cat", "../agent/secret"], timeout=30)
        found = await workspace.exec(replace(read, user="agent"))
        assert (found.stdout, found.stderr) == (b"mine", b"")
        assert b"Permission denied" in (await workspace.exec(replace(read, user="other"))).stderr
        assert await workspace.download("agent/secret") == b"mine"
        ended = Program(code="import os; os.kill(os.getppid(), 9)", user="agent", env=free, timeout=30)
        assert b"PermissionError" in (await workspace.exec(ended)).stderr, "its timer belongs to root"
        shell = await workspace.open_session(user="agent")
        assert (await shell.run("id -un; umask 077; echo 1 > other; cat secret")).output.split() == [b"agent", b"mine"]
        owner = await workspace.exec(Program(command=["stat", "-c", "%U", "agent/other"], timeout=30))
        assert owner.stdout == b"agent\n"
        with pytest.raises(UserRefused, match="the sandbox has no such user"):
            await workspace.exec(Program(command=["true"], user="someone"))
        assert (await workspace.exec(Program(command=["true"], timeout=30))).succeeded
        await workspace.close()
        await sandboxes.close()
