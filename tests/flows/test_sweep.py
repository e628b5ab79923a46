"""Tests `rollflow sweep`: the runs of a study, which of them are skipped, and what ends the sweep."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from signal import SIGKILL

import pytest

from rollflow.flows.commands import sweep
from rollflow.flows.commands.cli import main
from rollflow.flows.commands.cli.exit_codes import BAD_INPUT, FAILED, OK
from rollflow.flows.commands.cli.toml_edit import to_toml
from rollflow.flows.locations import list_runs
from rollflow.flows.views.summary import SUMMARY
from rollflow.tasks.run.context import RunContext
from tests.support.refused import refused
from tests.support.small_run import make_policy, train_small

RECIPE = "flows/recipes/sorting.toml"


def asked(*sets: str, seeds: int = 1) -> list[sweep.SweepRun]:
    return sweep.points_of(argparse.Namespace(recipe=Path(RECIPE), set=list(sets), seeds=seeds, study="rates"))


@pytest.mark.parametrize(
    ("override", "values"),
    [
        ("a=1,2", ["a=1", "a=2"]),
        ("a=1", ["a=1"]),
        ("a=[1, 2],[3]", ["a=[1, 2]", "a=[3]"]),
        ('a="x,y",z', ['a="x,y"', "a=z"]),
        ("a=[1,", ["a=[1,"]),  # the text is not TOML, so reading the recipe rejects it
    ],
)
def test_sweep_values_are_separated_by_commas_outside_quotes(override: str, values: list[str]) -> None:
    assert [one for [one] in sweep.combine_values([override])] == values


def test_sweep_runs_every_value_with_every_seed() -> None:
    points = asked("train.learning_rate=1e-4,3e-4", "train.objective.kind=grpo,tis", "seed=5", "versions=9", seeds=2)
    found = [(p.config.train.learning_rate, p.config.train.objective.kind, p.config.seed) for p in points]
    rates = [(rate, kind) for rate in (1e-4, 3e-4) for kind in ("grpo", "tis")]
    assert found == [(*one, seed) for one in rates for seed in (5, 6)]
    assert [point.run_id for point in points[:3]] == ["rates-0-s5", "rates-0-s6", "rates-1-s5"]
    assert {(p.config.tracking.study, p.config.versions) for p in points} == {("rates", 9)}
    assert points[-1].words == "train.learning_rate=3e-4, train.objective.kind=tis, seed 6"


def test_sweep_may_vary_a_key_that_the_recipe_lacks(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(Path(RECIPE).read_text() + '[train.objective.penalties]\nkl_to = "reference"\n')
    sets = ["train.objective.penalties.kl_weight=0.001,0.01"]
    points = sweep.points_of(argparse.Namespace(recipe=recipe, set=sets, seeds=1, study="weights"))
    assert [point.run_id for point in points] == ["weights-0-s0", "weights-1-s0"]


def test_sweep_refuses_bad_values_before_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    given = ["sweep", RECIPE, "--set"]
    assert "train.learning_rate = -1" in refused(capsys, *given, "train.learning_rate=1e-4,-1")
    assert "heads of size 5" in refused(capsys, *given, "policy.cold_start.hidden_size=128,20")
    assert "--study" in refused(capsys, *given, "seed=1", "--study", "../out")
    assert "--seeds 2000" in refused(capsys, *given, "seed=1", "--seeds", "2000")
    assert not list_runs()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], ["a sweep needs several values or seeds", "`rollflow run`"]),
        (["versions=5"], ["a sweep needs several values or seeds"]),
        (["versions"], ["--set 'versions'", "a value is missing"]),
        (["versions="], ["--set 'versions='", "a value is missing"]),
        (["versions=5,"], ["--set 'versions=5,'", "a value is missing"]),
        (["versions=5,,6"], ["a value is missing"]),
        (["=5,6"], ["a value is missing"]),
        (["versions=5,6,5"], ["the value 5 is given twice", "--seeds"]),
        (["versions=5,6", "versions=7"], ["versions is given twice", "one --set"]),
    ],
)
def test_sweep_without_values_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: list[str],
    words: list[str],
) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    said = refused(capsys, "sweep", RECIPE, *(part for one in given for part in ("--set", one)))
    assert all(word in said for word in words)
    assert not list_runs()


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    make_policy(tmp_path / "policy")
    tree = {
        "name": "small",
        "policy": {"path": str(tmp_path / "policy")},
        "versions": 2,
        "groups": 2,
        "group_size": 4,
        "async_ratio": 1,
        "engine": {"kind": "transformers", "max_new_tokens": 8},
        "train": {"warmup_versions": 0},
        "evaluation": {"prompts": 4},
    }
    (tmp_path / "small.toml").write_text(to_toml(tree))
    return tmp_path / "small.toml"


@pytest.mark.parametrize("code", [FAILED, pytest.param(BAD_INPUT, marks=pytest.mark.soak), -SIGKILL])
def test_repeated_sweep_skips_done_runs_and_reports_failures(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    """The run with the lower rate fails the first time, or its process dies."""
    driven: list[str] = []

    def drive(context: RunContext) -> int:
        driven.append(context.run_id)
        if context.config.train.learning_rate == 1e-4 and driven.count(context.run_id) == 1:
            return code
        train_small(context, 2)
        context.store.put(SUMMARY, json.dumps({"audit": "clean"}).encode())
        return OK

    monkeypatch.setattr(sweep, "drive", drive)
    given = ["sweep", str(recipe), "--set", "train.learning_rate=1e-4,1e-3", "--study", "mine"]
    assert main(given) == FAILED
    assert "failed: mine-0-s0 (train.learning_rate=1e-4, seed 0)" in capsys.readouterr().out
    assert main(given) == OK
    assert driven == ["mine-0-s0", "mine-1-s0", "mine-0-s0"]
    assert "run mine-1-s0 is done" in capsys.readouterr().out
    assert "exists already, and has other values" in refused(capsys, *given, "--set", "groups=4")
