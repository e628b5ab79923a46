"""Tests that `rollflow check` refuses a recipe whose sandboxes cannot run, and that `doctor` gives the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollflow.flows.commands.cli import main
from rollflow.flows.commands.doctor import run_checks
from rollflow.tasks.sandboxes import processes
from rollflow.tasks.scorers.code import pytest_case

RECIPE = (
    '[reward]\nkind = "code"\n[reward.sandbox]\nkind = "run-code"\nurl = "http://127.0.0.1:9/run_code"\ntries = 1\n'
)


PRINTED = {"stdin": "", "stdout": "1"}
PYTEST_CASE = {"pytest": "from solution import f\ndef test_f():\n    assert f() == 1\n"}


def check(folder: Path, *arguments: str, case: dict[str, str] = PRINTED) -> int:
    """Check a recipe whose programs run on a server that does not exist; return the exit code."""
    recipe, rows = folder / "recipe.toml", folder / "rows.jsonl"
    lines = [{"question": f"Print {n}.", "answer": "print(1)", "cases": [case]} for n in range(100)]
    rows.write_text("\n".join(map(json.dumps, lines)))
    recipe.write_text(f'{RECIPE}[[prompts]]\nkind = "jsonl"\npath = "{rows}"\n')
    return main(["check", str(recipe), "--set", "engine.kind=timed", *arguments])


def test_recipe_with_a_missing_sandbox_server_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path) == 2
    assert (
        "reward.sandbox.url = 'http://127.0.0.1:9/run_code': this server cannot run programs" in capsys.readouterr().err
    )


@pytest.mark.parametrize("part", ["", ".parts.tests.scorer"])
def test_sandbox_of_every_scorer_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """The scorer is one of `[rewards]`, or a part of a composite one."""
    monkeypatch.setenv("PATH", str(tmp_path))
    recipe, section = tmp_path / "recipe.toml", f"rewards.programs{part}"
    kind = '[rewards.programs]\nkind = "composite"\n' if part else ""
    (tmp_path / "rows.jsonl").write_text(
        "".join(f'{{"question": "{n}", "answer": "", "cases": [{{"stdout": ""}}]}}\n' for n in range(100))
    )
    recipe.write_text(
        '[[prompts]]\nkind = "sorting"\n[[prompts]]\nkind = "file"\npath = "rows.jsonl"\nreward = "programs"\n'
        f'{kind}[{section}]\nkind = "code"\n[engine]\nkind = "timed"\n'
    )
    assert main(["check", str(recipe)]) == 2
    assert f'{section}.sandbox.kind = "bubblewrap" cannot run on this machine' in capsys.readouterr().err


def test_pytest_case_is_refused_if_the_sandbox_is_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, "--offline", case=PYTEST_CASE) == 2
    error = capsys.readouterr().err
    assert 'line 1: case 1: reward.sandbox.kind = "run-code" cannot run test cases with "pytest"' in error
    assert 'use sandbox.kind = "bubblewrap", "sandlock" or "unsafe-process"' in error


def test_recipe_with_pytest_cases_needs_pytest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ("--set", "reward.sandbox.kind=unsafe-process")
    assert check(tmp_path, *plain, case=PYTEST_CASE) == 0
    monkeypatch.setattr(pytest_case, "_find_package", lambda _: None)
    assert check(tmp_path, *plain) == 0  # no case needs pytest
    capsys.readouterr()
    assert check(tmp_path, *plain, case=PYTEST_CASE) == 2
    wanted = (
        'rollflow: reward.sandbox.kind = "unsafe-process" cannot run test cases with "pytest": pytest is not installed'
    )
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(wanted)
    assert 'pip install "rollflow[testing]"' in line


def test_offline_check_contacts_no_sandbox_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, "--offline") == 0
    assert "not asked: reward.sandbox.url" in capsys.readouterr().out


def test_sandbox_url_with_a_password_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, "--set", 'reward.sandbox.url="http://user:word@host/run_code"') == 2
    assert "reward.sandbox.url" in capsys.readouterr().err


def test_recipe_is_refused_if_bubblewrap_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check(tmp_path, "--set", "reward.sandbox.kind=bubblewrap") == 2
    error = capsys.readouterr().err
    assert 'reward.sandbox.kind = "bubblewrap" cannot run on this machine: the program bwrap is not installed' in error
    assert len(error.splitlines()) == 1
    found = {one.name: one for one in run_checks(tmp_path / "home")}
    assert found["sandbox bubblewrap"].outcome == "note"
    assert "install the package bubblewrap" in found["sandbox bubblewrap"].found


def test_recipe_is_refused_if_sandlock_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "find_spec", lambda _: None)
    assert check(tmp_path, "--set", "reward.sandbox.kind=sandlock") == 2
    assert "pip install 'rollflow[sandlock]'" in capsys.readouterr().err
    found = {one.name: one for one in run_checks(tmp_path / "home")}
    assert "pip install 'rollflow[sandlock]'" in found["sandbox sandlock"].found
