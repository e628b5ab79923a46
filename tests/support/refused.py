"""Checks that a command refuses bad input with exit code 2 and one sentence, without a traceback."""

from __future__ import annotations

import pytest

from rollflow.flows.commands.cli import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must refuse its input, and return the sentence of its error."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    [line] = captured.err.strip().splitlines()
    assert line.startswith("rollflow: ")
    assert "Traceback" not in captured.out + captured.err
    return line.removeprefix("rollflow: ")


def refused_alike(capsys: pytest.CaptureFixture[str], recipe: str, *options: str) -> str:
    """Check that `rollflow check` and `rollflow run` refuse a recipe with the same sentence, and return the
    sentence.
    """
    by_check = refused(capsys, "check", recipe, *options)
    assert refused(capsys, "run", recipe, *options) == by_check
    return by_check
