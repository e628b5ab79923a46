"""Tests the trial of user-defined scorers before a run: a scorer that fails on every right answer is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollflow.flows.commands.cli import main
from tests.support.user_code import put_in_reach

SCORERS = """
from rollflow.tasks.scorers.base import Score, Unjudged

def misspelled(response: str, reference: dict) -> Score:
    return Score(float(response == reference["solution"]))

def picky(response: str, reference: dict) -> Score:
    return Score(float(len(reference["answer"]) > 1))

def stepwise(response: str, reference: dict) -> Score:
    return Score(1.0, step_values=[(len(response), 0.5)])

def absent(response: str, reference: dict) -> Score:
    raise Unjudged("no judge today")
"""
PART = '[reward]\nkind = "composite"\n[reward.parts.own.scorer]\nkind = "import"\npath = "graders:misspelled"\n'


@pytest.fixture(autouse=True)
def _reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "graders.py").write_text(SCORERS)
    put_in_reach(monkeypatch, tmp_path)
    rows = [{"problem": f"{n} + {n} =", "solution": str(2 * n)} for n in range(300)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


def check(folder: Path, reward: str, *arguments: str) -> int:
    recipe = folder / "recipe.toml"
    columns = '{ question = "problem", answer = "solution" }'
    recipe.write_text(
        f'[[prompts]]\nkind = "file"\npath = "rows.jsonl"\ncolumns = {columns}\n[engine]\nkind = "timed"\n{reward}'
    )
    return main(["check", str(recipe), *arguments])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "key"),
    [
        ('[reward]\nkind = "import"\npath = "graders:misspelled"\n', "reward.path = 'graders:misspelled'"),
        ('[reward]\nkind = "import"\npath = "graders:misspelled"\nformat = { pattern = "x" }\n', "reward.path"),
        (PART, "reward.kind = 'composite'"),
    ],
)
def test_scorer_that_fails_on_right_answers_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], reward: str, key: str
) -> None:
    assert check(tmp_path, reward) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert key in line
    assert ": it failed on the right answers to the first 3 questions" in line
    assert "KeyError: 'solution'" in line
    assert "correct it (a reference has the keys 'family', 'question', 'answer')" in line


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "code"), [("gspo", 2), ("grpo", 0)])
def test_objective_that_cannot_use_step_values_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str, code: int
) -> None:
    reward = f'[reward]\nkind = "import"\npath = "graders:stepwise"\n[train.objective]\nkind = "{kind}"\n'
    assert check(tmp_path, reward) == code
    words = "train.objective.ratio.level = 'geometric': the scorer gives values to tokens or steps"
    assert (words in capfd.readouterr().err) is (code == 2)


@pytest.mark.slow
def test_scorer_that_scores_right_answers_is_accepted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, '[reward]\nkind = "import"\npath = "graders:picky"\n') == 0
    assert "graders" not in capfd.readouterr().out


@pytest.mark.slow
def test_check_reports_a_scorer_that_cannot_judge_now(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, '[reward]\nkind = "import"\npath = "graders:absent"\n') == 0
    assert "were not judged (verifier failed: Unjudged: no judge today)" in capfd.readouterr().out


def test_offline_check_tries_no_scorer(tmp_path: Path) -> None:
    assert check(tmp_path, '[reward]\nkind = "import"\npath = "graders:misspelled"\n', "--offline") == 0
