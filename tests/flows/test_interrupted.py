"""Tests that an interrupted command ends with its exit code, wherever the interrupt arrives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# This command is interrupted while it executes a string of code, as dataclasses do, and catches the interrupt.
INTERRUPTED = """
import rollflow.flows.commands.check as check

def command(options):
    try:
        exec("import os, signal; os.kill(os.getpid(), signal.SIGINT)\\nfor _ in range(10**7): pass")
    except KeyboardInterrupt:
        return 1

check.command = command
"""


def test_command_may_return_its_own_code_after_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED)
    reach = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "rollflow.flows.commands.cli", "check", "mine.toml"]
    assert subprocess.run(command, env={**os.environ, "PYTHONPATH": reach}, check=False).returncode == 1
