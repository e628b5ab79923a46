"""Tests that the tests of a group run in one process, so that engines do not compete and servers are shared."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import HANG_SECONDS

ROOT = Path(__file__).parents[1]
TESTS = """
import os
import pytest

@pytest.mark.parametrize("number", range(6))
@pytest.mark.xdist_group("one")
def test_of_a_group(number, worker_id):
    with open("workers", "a") as workers:
        workers.write(worker_id + "\\n")
"""


@pytest.mark.long
def test_tests_of_an_xdist_group_run_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    beside = ["-p", "xdist", "-n", "2", "--dist", "loadgroup", "-p", "tests.conftest", "-c", os.devnull]
    command = [sys.executable, "-m", "pytest", *beside, "--rootdir", str(tmp_path), "test_some.py"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = os.pathsep.join([str(ROOT / ".dev"), str(ROOT)])
    environment = clean | {"PYTHONPATH": path}
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    workers = (tmp_path / "workers").read_text().split()
    assert (len(workers), len(set(workers))) == (6, 1)
