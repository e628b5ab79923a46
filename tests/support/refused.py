"""Checks that a command refuses bad input as it should: exit code 2, one sentence, no traceback."""

from __future__ import annotations

import pytest

from rollflow.flows.commands.cli import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must be refused; return its sentence."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    [line] = captured.err.strip().splitlines()
    assert line.startswith("rollflow: ")
    assert "Traceback" not in captured.out + captured.err
    return line.removeprefix("rollflow: ")


def refused_alike(capsys: pytest.CaptureFixture[str], recipe: str, *options: str) -> str:
    """Check that `check` and `run` refuse a recipe with the same sentence; return it."""
    by_check = refused(capsys, "check", recipe, *options)
    assert refused(capsys, "run", recipe, *options) == by_check
    return by_check
