"""Tests that sandboxes of host processes leave no processes or files behind, whichever process is killed and whatever
the program did.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rollflow.storage.errors import ConfigError
from rollflow.tasks.sandboxes import build_sandboxes
from rollflow.tasks.sandboxes.base import Program
from rollflow.tasks.sandboxes.config import SandlockSandbox, UnsafeProcessSandbox
from tests.support.sandbox_processes import list_sandbox_processes

KINDS = {"sandlock": SandlockSandbox(spares=0), "unsafe-process": UnsafeProcessSandbox(spares=0)}
LONG = 60.0
LEAVES = (
    "import os, time\\nif os.fork() == 0:\\n    os.setsid()\\n    if os.fork() == 0: time.sleep(600)\\n"
    "    os._exit(0)\\ntime.sleep(600)"
)
OWNER = f"""
import asyncio, sys
from rollflow.tasks.sandboxes import build_sandboxes
from rollflow.tasks.sandboxes.base import Program
from tests.sandboxes.test_processes import KINDS
async def main():
    sandboxes = build_sandboxes(KINDS[sys.argv[1]])
    await sandboxes.start()
    print("started", flush=True)
    await sandboxes.run(Program(code="{LEAVES}", timeout=600))
asyncio.run(main())
"""
SILENT_CHILD = "import ctypes, time\nif ctypes.CDLL(None).syscall(56, 0, 0, 0, 0, 0) == 0:\n    time.sleep(600)"
DEEP = (
    "import os\nfor _ in range(1500):\n    os.mkdir('deep'); os.chdir('deep')\n"
    "try: os.chmod('.', 0)\nexcept OSError: pass\nprint('done')"
)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; fail after 30 seconds."""
    limit = time.monotonic() + 30
    while not condition() and time.monotonic() < limit:
        time.sleep(0.05)
    assert condition()


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie process does not run."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.long
@pytest.mark.parametrize("killed", ["owner", "keeper"])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_process_leaves_no_child_process(kind: str, killed: str, tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    owner = subprocess.Popen([sys.executable, "-c", OWNER, kind], stdout=subprocess.PIPE, env=env)
    try:
        assert owner.stdout is not None
        if not owner.stdout.readline():
            pytest.skip(f"sandboxes of kind {kind} cannot run on this machine")
        wait_until(lambda: len(psutil.Process(owner.pid).children(recursive=True)) >= 4)
        found = psutil.Process(owner.pid).children(recursive=True)
        keepers = [keeper for parent in psutil.Process(owner.pid).children() for keeper in parent.children()]
        for process in [psutil.Process(owner.pid)] if killed == "owner" else keepers:
            process.kill()
        owner.wait(LONG)  # without its keeper, the owner ends with an error
        wait_until(lambda: not any(is_alive(process) for process in found))
    finally:
        owner.kill()
        owner.communicate()
    wait_until(lambda: not list(tmp_path.iterdir()))


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the program uses a number of x86-64")
@pytest.mark.parametrize("kind", KINDS)
async def test_child_process_without_parent_death_signal_is_killed(kind: str) -> None:
    sandboxes = build_sandboxes(KINDS[kind])
    try:
        await sandboxes.start()
    except ConfigError as error:
        pytest.skip(str(error))
    sandbox = await sandboxes.create()
    before = len(list_sandbox_processes())
    assert (await sandbox.exec(Program(code=SILENT_CHILD, timeout=LONG))).succeeded
    assert len(list_sandbox_processes()) <= before
    await sandboxes.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_deep_folder_without_permissions_is_removed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sandboxes = build_sandboxes(KINDS[kind])
    try:
        await sandboxes.start()
    except ConfigError as error:
        pytest.skip(str(error))
    assert (await sandboxes.run(Program(code=DEEP, timeout=LONG))).stdout == b"done\n"
    await sandboxes.close()
    assert list(tmp_path.iterdir()) == []
