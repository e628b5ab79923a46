"""Metrics of episodes with several turns, worked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.records import Branch, Outcome
from rollflow.tasks.actors.turn_metrics import compute_turn_metrics
from tests.support.batches import group


def measure(*values: dict[str, Any]) -> dict[str, float]:
    bare = group(0)
    rows = tuple(replace(bare.trajectories[0], sample=n, **more) for n, more in enumerate(values))
    made = TrajectoryBatch.from_groups([replace(bare, trajectories=rows)])
    return compute_turn_metrics(TrajectoryBatch.from_bytes(made.to_bytes()))


def test_turn_metrics_match_a_hand_example() -> None:
    """Two turns and one turn, with three sampled tokens."""
    found = measure(
        {"turn_starts": (1, 2), "loss_mask": (False, True, True), "outcome": Outcome.CORRECT},
        {"turn_starts": (2,), "loss_mask": (False, False, True), "outcome": Outcome.WRONG},
    )
    assert (found["turns"], found["turn_length"]) == (1.5, 1.0)
    assert (found["outcome_correct"], found["outcome_wrong"], found["outcome_partial"]) == (0.5, 0.5, 0.0)


def test_turn_metrics_count_an_episode_with_branches_once() -> None:
    found = measure(
        {"turn_starts": (1,), "loss_mask": (False, True, False), "outcome": Outcome.CORRECT},
        {
            "turn_starts": (1, 2),
            "loss_mask": (False, True, True),
            "outcome": Outcome.CORRECT,
            "branch": Branch(0, 1),
        },
    )
    assert (found["turns"], found["turn_length"], found["outcome_correct"]) == (3.0, pytest.approx(1.0), 1.0)


def test_single_turn_episodes_have_no_turn_metrics() -> None:
    assert measure({"outcome": Outcome.CORRECT}) == {}
