"""Creates virtual environments with packages that rollflow's environment does not have, for tests of foreign
environments.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 240  # time limit that ends an installation that hangs


def make_python(factory: pytest.TempPathFactory, *packages: str) -> str:
    """Return the interpreter of a virtual environment with these packages. The environment is created once for all
    processes of the tests. Without a package index, the test is skipped, because the failure would be that of the
    machine, not of rollflow.
    """
    own = factory.getbasetemp()
    home = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "-".join(["venv", *packages]).replace(
        "*", "x"
    )
    home.mkdir(exist_ok=True)
    made, failed, python = home / "made", home / "failed", home / "bin" / "python"
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made.exists() or failed.exists()):
            reason = install(home, python, packages)
            (failed if reason else made).write_text(reason)
    if failed.exists():
        pytest.skip(f"pip cannot install {' '.join(packages)} here: {failed.read_text()}")
    return str(python)


def install(home: Path, python: Path, packages: tuple[str, ...]) -> str:
    """Make a virtual environment and install packages; return why pip failed, or ""."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    quick = ["--quiet", "--no-input", "--disable-pip-version-check", "--retries", "1", "--timeout", "30"]
    subprocess.run([sys.executable, "-m", "venv", home], check=True, timeout=SECONDS, env=variables)
    command = [python, "-m", "pip", "install", *quick, *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=variables, check=False)
    except subprocess.TimeoutExpired:
        return f"it took more than {SECONDS} s"
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return "" if not done.returncode else (said or [f"it ended with code {done.returncode}"])[-1]
