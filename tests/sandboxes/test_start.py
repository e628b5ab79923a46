"""Tests that sandboxes start on each machine that can run bwrap. The other tests of sandboxes are skipped if no sandbox
starts, so they do not find an error of rollflow.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from rollflow.storage.errors import ConfigError
from rollflow.tasks.sandboxes.base import Program
from rollflow.tasks.sandboxes.bubblewrap import BubblewrapSandboxes
from tests.sandboxes.box import CONFIG, LONG, PYTHON, Box

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


def test_sandbox_uses_the_shared_library_of_its_own_python() -> None:
    """Without it, Python would not start, or would use the library of another Python that the machine has."""
    if not sysconfig.get_config_var("Py_ENABLE_SHARED") or sys.base_prefix.startswith("/usr"):
        pytest.skip("this Python has no shared library, or is that of the system")
    box = Box(BubblewrapSandboxes(CONFIG))
    try:
        command = [PYTHON, "-c", "print(open('/proc/self/maps').read())"]
        maps = box.do(box.sandboxes.run(Program(command=command))).stdout
    except ConfigError as error:
        pytest.skip(str(error))
    finally:
        box.close()
    used = {Path(library).parent for library in re.findall(r"\S*/libpython3\S*", maps.decode())}
    assert used == {Path("/python/lib")}
