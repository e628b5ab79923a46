"""Tests that the recipes of rollflow reach their accuracy with several kinds of learners, in whole runs of some minutes
each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_runs import Command
from tests.support.waiting import RUN_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.xdist_group("vllm")]

RECIPES = Path("flows/recipes")
SEED = "seed=0"
LEARNERS = {  # changed keys of the quick start's recipe
    "as it is": [],
    "ppo with a critic": [  # synchronous: with stale batches, results differ by ten points, see docs/objectives.md
        "train.objective.kind=ppo",
        "async_ratio=0",
    ],
    "lora": ["train.lora.rank=16", "train.learning_rate=5e-3"],
    "divergence from a reference": [
        "train.objective.penalties.kl_to=reference",
        "train.objective.penalties.kl_weight=0.01",
    ],
    "bfloat16": ["policy.dtype=bfloat16"],
}


def trained(home: Path, recipe: str, changes: list[str]) -> dict[str, Any]:
    """Execute a run, check that its first and its last version can be replayed with the same bits, and return its
    summary.
    """
    command = Command(home, (RECIPES / recipe).read_text())
    options = [word for change in changes for word in ("--set", change)]
    command.run("run", str(command.recipe), "--run-id", "run", *options, seconds=3 * RUN_SECONDS)
    for version in ("1", str(command.summary("run")["versions"])):
        assert "identical" in command.run("replay", "run", version)
    return command.summary("run")


@pytest.mark.parametrize("changes", LEARNERS.values(), ids=LEARNERS)
def test_quick_start_reaches_its_accuracy(tmp_path: Path, changes: list[str]) -> None:
    found = trained(tmp_path, "sorting.toml", [SEED, *changes])
    assert found["audit"] == "clean"
    assert found["accuracy"]["before"] <= 0.35
    assert found["accuracy"]["after"] >= 0.85


def test_reasoning_recipe_reaches_its_accuracy(tmp_path: Path) -> None:
    found = trained(tmp_path, "reasoning.toml", [SEED])
    assert found["audit"] == "clean"
    assert found["accuracy"]["before"] < 0.35
    assert found["accuracy"]["after"] >= 0.75  # two evaluations differ by two points, two seeds by more


def test_python_tool_recipe_reaches_its_accuracy(tmp_path: Path) -> None:
    found = trained(tmp_path, "python_tool.toml", [SEED])
    assert found["audit"] == "clean"
    assert found["accuracy"]["before"] < 0.5
    assert found["accuracy"]["after"] >= 0.9
