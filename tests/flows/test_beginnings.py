"""Tests that `init` writes a recipe to start from, and that `--completion` prints a shell's completion script."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rollflow.flows.commands.cli import main
from rollflow.flows.config import load_recipe
from rollflow.tasks.run.config import RunConfig
from tests.support.refused import refused
from tests.support.waiting import HANG_SECONDS


def test_init_command_writes_a_valid_recipe_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe is valid as `init` writes it, and with every key set to its default."""
    recipe = tmp_path / "mine.toml"
    assert main(["init", str(recipe)]) == 0
    capsys.readouterr()
    assert load_recipe(recipe) == RunConfig(name="mine")
    text = recipe.read_text()
    assert text.count("#: ") > 60
    assert "#: learning_rate = " in text
    (tmp_path / "all.toml").write_text(text.replace("#: ", ""))
    assert load_recipe(tmp_path / "all.toml") == RunConfig(name="mine")
    assert "exists already" in refused(capsys, "init", str(recipe))
    assert recipe.read_text() == text
    assert "cannot be written" in refused(capsys, "init", str(recipe / "below.toml"))


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("rollflow s", ["sweep", "stop", "status", "serve"]),
        ("rollflow --comp", ["--completion"]),
        ("rollflow check --res", ["--resolved"]),
        ("rollflow --completion z", ["zsh"]),
        ("rollflow check reci", []),
    ],
)
def test_bash_completes_commands_and_options(
    words: str, completed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--completion", "bash"])
    assert ended.value.code == 0
    script = capsys.readouterr().out
    ask = f'COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _rollflow; echo "${{COMPREPLY[@]}}"'
    command = ["bash", "-c", f"{script}\n{ask}"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS).stdout.split() == completed
