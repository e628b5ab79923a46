"""Tests that sandboxes start on each machine that can run bwrap. The other tests of sandboxes are skipped if no sandbox
starts, so they do not find an error of rollflow.
"""

from __future__ import annotations

import shutil
import subprocess

import pytest

from rollflow.tasks.sandboxes.base import Program
from rollflow.tasks.sandboxes.bubblewrap import BubblewrapSandboxes
from tests.sandboxes.box import CONFIG, LONG, Box

# command that creates user, process and mount namespaces, as sandboxes have them
BARE = ["bwrap", "--unshare-user", "--unshare-pid", "--ro-bind", "/", "/", "--proc", "/proc", "--tmpfs", "/tmp", "true"]


def test_bubblewrap_starts_if_this_machine_can_run_it() -> None:
    if not shutil.which("bwrap"):
        pytest.skip("bwrap is not installed")
    bare = subprocess.run(BARE, capture_output=True, text=True, timeout=LONG)
    if bare.returncode:
        pytest.skip(f"this machine gives bwrap no namespaces: {bare.stderr.strip()}")
    box = Box(BubblewrapSandboxes(CONFIG))
    try:
        box.do(box.sandboxes.start())
        assert box.do(box.sandboxes.run(Program(command=["true"]))).succeeded
    finally:
        box.close()
