"""Tests the table of `rollflow plan`, the files that it writes, and its one-sentence errors for bad input."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rollflow.flows.commands import plan as planning
from rollflow.flows.commands.cli import main
from rollflow.flows.commands.cli.plan_costs import load_prices
from rollflow.flows.commands.cli.toml_edit import rewrite_toml, to_toml
from rollflow.tasks.simulation.candidates import SimulationBudget
from tests.support.refused import refused

RECIPE = "flows/recipes/sorting.toml"
SMALL = ("--set", "groups=8", "--set", "group_size=4", "--alpha", "2", "--quick")
FILE = """
# a small machine, measured in May
[engines]
max_concurrent_requests = 4  # as many as its cache holds
seconds_per_token = 0.1
prefill_seconds = 0.0  # nothing to speak of

[responses]
median = 20
cap = 200

[learner]
seconds_per_trajectory = 0.6
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(planning, "QUICK", SimulationBudget(24, 3, 100, 8, 300))
    path = tmp_path / "hardware.toml"
    path.write_text(FILE)
    return path


def test_written_plan_reproduces_the_printed_numbers(
    capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path
) -> None:
    recipe, figures, again = tmp_path / "planned.toml", tmp_path / "plan.json", tmp_path / "again.json"
    arguments = ["--gpus", "6", "--hardware", str(file), *SMALL, "--write", str(recipe), "--json", str(figures)]
    assert main(["plan", RECIPE, *arguments]) == 0
    captured = capsys.readouterr()
    taken = json.loads(figures.read_text())["recommended"]
    step = taken["figures"]["step_seconds"]
    [row] = [line for line in captured.out.splitlines() if line.endswith("<- take") or "<- take " in line]
    assert f"{step:,.4g}" in row
    assert "the smallest alpha within 5% of the best throughput that keeps the limits" in captured.out
    assert "simulation 1 of at most 24" in captured.err
    [command] = [line.split()[1:] for line in captured.out.splitlines() if line.startswith("  rollflow plan")]
    assert main([*command, "--json", str(again)]) == 0
    assert json.loads(again.read_text())["step_seconds"] == step


def test_planned_recipe_differs_only_in_the_planned_keys(file: Path, tmp_path: Path) -> None:
    written = tmp_path / "planned.toml"
    assert main(["plan", RECIPE, "--gpus", "6", "--hardware", str(file), *SMALL, "--write", str(written)]) == 0
    before, after = tomllib.loads(Path(RECIPE).read_text()), tomllib.loads(written.read_text())
    before["train"]["kind"] = "torch"  # the written recipe names the kind of a section that has several kinds
    divided = tomllib.loads((tmp_path / "planned-hardware.toml").read_text())
    assert {key for key in after if after[key] != before.get(key)} <= {
        "groups", "group_size", "async_ratio", "engine", "rollout", "train"
    }  # fmt: skip
    assert after["train"] == {**before["train"], "ranks": divided["learner"]["gpus"]}
    assert after["engine"]["max_concurrent_requests"] == 4
    assert after["engine"].get("replicas", 1) == divided["engines"]["count"]
    assert divided["engines"]["count"] + divided["learner"].get("gpus", 1) == 6
    assert main(["check", str(written)]) == 0


def test_planned_recipe_keeps_comments(file: Path, tmp_path: Path) -> None:
    given, once, twice = tmp_path / "given.toml", tmp_path / "once.toml", tmp_path / "twice.toml"
    text = Path(RECIPE).read_text()
    given.write_text(text.replace("async_ratio = 1 ", "async_ratio = 0  # what we had "))
    arguments = ["--gpus", "6", "--hardware", str(file), *SMALL, "--write"]
    assert main(["plan", str(given), *arguments, str(once)]) == 0
    assert main(["plan", str(once), *arguments, str(twice)]) == 0
    for path in (once, twice):
        written = path.read_text()
        assert "# The quick start: a small policy learns to sort" in written
        assert "  # what we had" in written
        assert written.count("# Planned for 6 GPUs") == 1
    assert tomllib.loads(once.read_text())["async_ratio"] > 0
    assert tomllib.loads(once.read_text()) == tomllib.loads(twice.read_text())


def test_planned_hardware_file_keeps_comments(file: Path, tmp_path: Path) -> None:
    once, twice = tmp_path / "once.toml", tmp_path / "twice.toml"
    arguments = [RECIPE, "--gpus", "6", *SMALL]
    assert main(["plan", *arguments, "--hardware", str(file), "--write", str(once)]) == 0
    divided = tmp_path / "once-hardware.toml"
    assert main(["plan", *arguments, "--hardware", str(divided), "--write", str(twice)]) == 0
    for path in (divided, tmp_path / "twice-hardware.toml"):
        written = path.read_text()
        assert (
            "# a small machine, measured in May\n[engines]\nmax_concurrent_requests = 4  # as many as its cache holds\n"
            in written
        )
        assert "prefill_seconds = 0.0  # nothing to speak of\n" in written
        assert written.count("# Planned for 6 GPUs") == 1
    assert tomllib.loads(divided.read_text()) == tomllib.loads((tmp_path / "twice-hardware.toml").read_text())


@pytest.mark.long
def test_plan_beyond_the_bias_limit_writes_no_recipe(
    capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path
) -> None:
    written = tmp_path / "planned.toml"
    arguments = ["--set", "rollout.redundant_responses=4", "--max-bias", "0.001", "--write", str(written)]
    assert main(["plan", RECIPE, "--gpus", "6", "--hardware", str(file), *SMALL, *arguments]) == 1
    out = capsys.readouterr().out
    assert "Nothing is recommended" in out
    assert "biased" in out
    assert not written.exists()


def test_bad_input_gets_a_one_sentence_error(capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path) -> None:
    given = ("--hardware", str(file), "--gpus")
    assert "--gpus 1: an engine takes 1" in refused(capsys, "plan", RECIPE, *given, "1")
    assert "--alpha -1: give a number of 0 or more" in refused(capsys, "plan", RECIPE, *given, "6", "--alpha", "-1")
    assert "--max-bias nan: give" in refused(capsys, "plan", RECIPE, *given, "6", "--max-bias", "nan")
    assert "is the recipe itself" in refused(capsys, "plan", RECIPE, *given, "6", "--write", RECIPE)
    assert "there is no folder" in refused(
        capsys, "plan", RECIPE, *given, "6", "--write", str(tmp_path / "no" / "x.toml")
    )
    assert "'nowhere.toml' cannot be read" in refused(
        capsys, "plan", RECIPE, "--hardware", "nowhere.toml", "--gpus", "6"
    )
    assert "did you mean" in refused(capsys, "plan", RECIPE, *given, "6", "--set", "async_ration=2")
    with pytest.raises(SystemExit):
        main(["plan", RECIPE, *given, "0"])


def test_toml_is_unchanged_after_write_and_read() -> None:
    tree = {
        "name": 'an "odd" one\n', "many": [1, 2.5], "empty": [], "flag": True,
        "part": {"tiny": 1e-9, "deeper": {"x": [{"a": 1}, {"a": 2, "b": {"c": []}}]}, "none": {}},
        "list": [{"kind": "k", "options": {"ops": ["+"], "mixed": [[1], [{"z": 1}]]}}],
    }  # fmt: skip
    assert tomllib.loads(to_toml(tree | {"left_out": None})) == tree


COMMENTED = """\
# the whole
name = "a"   # the name
seed = 1_000

# how it learns
[train]
rate = 1e-3 # small

[[prompts]] # the first
kind = "r"
[prompts.options]
ops = [  # which
  "+",
]

# out of order
[train.objective]
kind = "grpo"
pair = { low = 1, high = 2 } # both
"""


def test_rewritten_toml_file_keeps_comments() -> None:
    tree = tomllib.loads(COMMENTED)
    assert rewrite_toml(COMMENTED, tree) == COMMENTED
    tree |= {"seed": 2, "groups": 8, "rollout": {"max_batches_ahead": 1.5, "none": None}}
    tree["train"]["steps"] = 4
    tree["train"]["objective"]["pair"]["high"] = 3
    tree["prompts"][0]["options"]["low"] = [0]
    del tree["train"]["rate"]
    expected = COMMENTED.replace("1_000\n", "2\ngroups = 8\n").replace("high = 2", "high = 3")
    expected = expected.replace("rate = 1e-3 # small\n", "steps = 4\n").replace("]\n\n# out", "]\nlow = [0]\n\n# out")
    assert rewrite_toml(COMMENTED, tree) == expected + "\n[rollout]\nmax_batches_ahead = 1.5\n"


def test_removing_a_toml_section_removes_its_comments() -> None:
    tree = tomllib.loads(COMMENTED)
    del tree["prompts"]
    assert "# out of order" in rewrite_toml(COMMENTED, tree)
    del tree["train"]
    assert rewrite_toml(COMMENTED, tree) == '# the whole\nname = "a"   # the name\nseed = 1_000\n'


@pytest.mark.parametrize(
    "change",
    [
        # a section below a dotted key, which tomlkit would write between the keys
        {"a": {"b": {"c": 1, "d": {"e": 1}}}},
        {"a": {"b": 7}, "list": []},
        {"list": [{"x": 1}, {"x": [2, 3]}, {"x": {"y": 4}}]},
        {"z": {"new": 2}},  # a section that is split in two, from which tomlkit cannot remove keys
    ],
)
def test_rewritten_toml_file_has_the_new_values(change: dict[str, Any]) -> None:
    text = "a.b.c = 1  # dotted\nlast = 3\n[[list]]\nx = 1\n[[list]]\nx = [2]\n[z.y.x]\nk = 1\n[end]\n[z]\nj = 1\n"
    tree = tomllib.loads(text) | change
    assert tomllib.loads(rewrite_toml(text, tree)) == tree


PRICES = """
currency = "USD"
rest_hour = 1.0
[rollout]
gpus = 1
hour = 2.0
[train]
gpus = 2
hour = 6.0
[storage]
gb_month = 0.5
weights_gb = 2.0
"""


def test_cost_of_a_plan_is_printed(capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path) -> None:
    """The printed costs equal the costs that the test computes from the simulated numbers of the split."""
    prices, figures = tmp_path / "prices.toml", tmp_path / "plan.json"
    prices.write_text(PRICES)
    arguments = ["--gpus", "6", "--hardware", str(file), *SMALL, "--json", str(figures), "--cost", str(prices)]
    assert main(["plan", RECIPE, *arguments]) == 0
    out = capsys.readouterr().out
    taken = json.loads(figures.read_text())["recommended"]
    engines, learner = taken["candidate"]["engines"], int(taken["candidate"]["learner_gpus"])
    hour = engines * 2.0 + math.ceil(learner / 2) * 6.0 + 1.0
    version = hour * taken["figures"]["step_seconds"] / 3600
    assert taken["cost"]["hour"] == pytest.approx(hour)
    assert taken["cost"]["version"] == pytest.approx(version)
    assert (
        f"The recommended plan costs {version:,.4g} USD a version and {150 * version:,.4g} USD for 150 versions" in out
    )
    assert (
        f"({hour:,.4g} USD an hour; machines: {engines} for rollout and {math.ceil(learner / 2)} for training)" in out
    )
    assert "The synchronous mode costs " in out
    assert f"What the run keeps in storage costs {taken['cost']['storage_month']:,.4g} USD a month." in out


@pytest.mark.parametrize(
    ("right", "wrong", "sentence"),
    [
        ('currency = "USD"', "currency = 7", "currency = 7 is not of type 'string'"),
        ("gpus = 2", "gpus = 0", "train.gpus = 0 is less than or equal to the minimum of 0"),
        ("hour = 6.0", "hour = -1", "train.hour = -1 is less than the minimum of 0"),
        ("hour = 6.0", "hour = inf", "train.hour = inf: input should be a finite number"),
        ("hour = 6.0", "hour = true", "train.hour = true: true and false are not numbers; write a number"),
        ("hour = 6.0", "", "train.hour is missing; add the key"),
        ("gb_month = 0.5", 'gb_month = "much"', "storage.gb_month = 'much' is not of type 'number'"),
        ("rest_hour", "rest", "rest = 1.0: there is no such key; did you mean rest_hour?"),
        ("rest_hour", "zzz", "zzz = 1.0: there is no such key; remove the key; docs/planning.md lists all keys"),
    ],
)
def test_invalid_price_file_is_refused(
    capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path, right: str, wrong: str, sentence: str
) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES.replace(right, wrong))
    said = refused(capsys, "plan", RECIPE, "--gpus", "6", "--hardware", str(file), "--cost", str(prices))
    assert said == f"file of prices '{prices}': {sentence}"


def test_missing_price_file_is_refused(capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    said = refused(capsys, "plan", RECIPE, "--gpus", "6", "--hardware", str(file), "--cost", str(prices))
    assert said.startswith(f"file of prices '{prices}' cannot be read (No such file")


def test_shipped_price_file_is_read() -> None:
    assert load_prices(Path("infra/prices.toml")).currency == "USD"
