"""Tests that every command ends without an error message if the reader of its output ends, as in `rollflow keys |
head`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollflow.flows.commands.cli import main
from rollflow.storage.objects.local import LocalStore
from tests.support.described import describe
from tests.support.waiting import HANG_SECONDS

RECIPE = "flows/recipes/sorting.toml"
ROOT = Path(__file__).resolve().parents[2]


def unread(arguments: list[str]) -> tuple[int, bytes]:
    """Return exit code and standard error of a command whose output has no reader."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "rollflow.flows.commands.cli", *arguments]
    with os.fdopen(writing, "wb") as output:
        run = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.PIPE, timeout=HANG_SECONDS)
    return run.returncode, run.stderr


@pytest.fixture
def run(tmp_path: Path) -> str:
    """Return the URI of a run that is prepared but not trained."""
    store = LocalStore(tmp_path / "some")
    describe(store)
    return store.uri


@pytest.mark.parametrize("verb", ["keys", "keys --markdown", "keys --hardware", f"check {RECIPE}"])
def test_commands_end_quietly_if_the_pipe_is_closed(verb: str) -> None:
    code, said = unread(verb.split())
    assert said == b""
    assert code == 1


def test_help_ends_quietly_if_the_pipe_is_closed() -> None:
    """argparse prints the help and ignores the broken pipe."""
    assert unread(["--help"]) in ((0, b""), (1, b""))


@pytest.mark.parametrize("verb", ["audit", "log", "log --json"])
def test_run_commands_end_quietly_if_the_pipe_is_closed(verb: str, run: str) -> None:
    code, said = unread([*verb.split()[:1], run, *verb.split()[1:]])
    assert said == b""
    assert code == 1


def test_broken_pipe_to_another_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken pipe to another process, such as one that died, is reported as an error."""

    def broken(options: object) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("rollflow.flows.commands.keys.command", broken)
    with pytest.raises(BrokenPipeError):
        main(["keys"])
