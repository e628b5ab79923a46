"""Tests that the tests of a group run in one process, so that engines do not compete and servers are shared."""

from __future__ import annotations

import json
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
    if number == 4 and os.path.exists("skips"):
        pytest.skip()
    assert number != 4 or not os.path.exists("fails")
"""


BESIDE = ("-p", "xdist", "-n", "2", "--dist", "loadgroup")
AGAIN = ("-p", "no:xdist", "--last-failed", "--last-failed-no-failures", "none")  # the options of `make again`


def run_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of a folder with the settings of this repository's tests."""
    command = [sys.executable, "-m", "pytest", *options, "-p", "tests.conftest", "-c", os.devnull]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = clean | {"PYTHONPATH": os.pathsep.join([str(ROOT / ".dev"), str(ROOT)])}
    return subprocess.run(
        [*command, "--rootdir", str(folder), "test_some.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


@pytest.mark.long
def test_tests_of_an_xdist_group_run_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    ran = run_pytest(tmp_path, *BESIDE)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    workers = (tmp_path / "workers").read_text().split()
    assert (len(workers), len(set(workers))) == (6, 1)


@pytest.mark.long
def test_failed_test_of_a_group_is_repeated_alone(tmp_path: Path) -> None:
    """A repeated test that fails again is reported. Without a failed test, no test runs, and the exit code is 5."""
    (tmp_path / "test_some.py").write_text(TESTS.replace(", worker_id", "").replace("worker_id", "str(number)"))
    assert run_pytest(tmp_path, *AGAIN).returncode == 5
    (tmp_path / "fails").touch()
    assert run_pytest(tmp_path, *BESIDE).returncode == 1
    for expected in (1, 0):
        (tmp_path / "workers").unlink()
        ran = run_pytest(tmp_path, *AGAIN)
        assert (ran.returncode, (tmp_path / "workers").read_text()) == (expected, "4\n"), ran.stdout + ran.stderr
        (tmp_path / "fails").unlink(missing_ok=True)
    assert (tmp_path / ".pytest_cache/v/cache/lastfailed").read_text() == "{}"  # `make again` checks this


@pytest.mark.long
def test_failed_test_that_is_skipped_stays_in_the_list(tmp_path: Path) -> None:
    """`make again` fails, because the test has not passed."""
    (tmp_path / "test_some.py").write_text(TESTS.replace(", worker_id", "").replace("worker_id", "str(number)"))
    (tmp_path / "fails").touch()
    assert run_pytest(tmp_path, "-p", "no:xdist").returncode == 1
    (tmp_path / "skips").touch()
    assert run_pytest(tmp_path, *AGAIN).returncode == 0
    failed = json.loads((tmp_path / ".pytest_cache/v/cache/lastfailed").read_text())
    assert failed == {"test_some.py::test_of_a_group[4]": True}


@pytest.mark.parametrize(("status", "kept"), [(1, True), (2, False), (3, False)])
def test_interrupted_tests_are_not_repeated(tmp_path: Path, status: int, kept: bool) -> None:
    """Some tests of an interrupted run did not run. Without the list of failed tests, `make again` fails."""
    listed = tmp_path / ".pytest_cache/v/cache/lastfailed"
    listed.parent.mkdir(parents=True)
    listed.write_text("{}")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "-f", str(ROOT / "Makefile"), "-o", "lint", "full", f"PYTEST=sh -c 'exit {status}'"]
    ran = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, timeout=HANG_SECONDS, check=False)
    assert (ran.returncode, listed.exists()) == (2, kept), ran.stderr
