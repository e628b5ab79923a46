"""Tests of the metrics of a batch by domain (prompt source) and by reward part, against hand calculations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.records import Outcome, TrajectoryGroup
from rollflow.tasks.actors.batch_metrics import compute_domain_metrics
from rollflow.tasks.scorers.base import MOST_PARTS
from tests.support.batches import group


def rows(number: int, domain: str, *values: dict[str, Any]) -> TrajectoryGroup:
    """Build a group with one trajectory for each mapping of values."""
    bare = group(number)
    made = tuple(replace(bare.trajectories[0], sample=n, **more) for n, more in enumerate(values))
    return replace(bare, domain=domain, trajectories=made)


def metrics(*groups: TrajectoryGroup, domains: tuple[str, ...] = ("sums", "words")) -> dict[str, float]:
    return compute_domain_metrics(TrajectoryBatch.from_bytes(TrajectoryBatch.from_groups(groups).to_bytes()), domains)


def test_metrics_of_a_prompt_source_are_means_over_its_rows() -> None:
    found = metrics(
        rows(
            0,
            "sums",
            {"reward": 1.0, "outcome": Outcome.CORRECT, "loss_mask": (False, True, True)},
            {"reward": 0.5, "outcome": Outcome.PARTIAL, "loss_mask": (False, False, True)},
        ),
        rows(1, "words", {"reward": 0.25, "outcome": Outcome.WRONG, "loss_mask": (False, False, False)}),
    )
    assert found == {
        "groups_sums": 1.0,
        "groups_words": 1.0,
        "reward_sums": 0.75,
        "reward_words": 0.25,
        "accuracy_sums": 0.5,
        "accuracy_words": 0.0,
        "response_length_sums": 1.5,
        "response_length_words": 0.0,
    }


def test_reward_part_metrics_are_means_over_rows_with_the_part() -> None:
    """Rows without the part are ignored, for example rows of another scorer or rows without a constraint."""
    found = metrics(
        rows(0, "sums", {"reward_parts": {"answer": 1.0, "short": 0.5}}, {"reward_parts": {"answer": 0.0}}, {}),
        rows(1, "words", {"reward_parts": {"answer": 0.25, "rules.punctuation:no_comma": 1.0}}),
    )
    parts = {name: value for name, value in found.items() if name.startswith("part_")}
    assert parts == {
        "part_sums_answer": 0.5,
        "part_sums_short": 0.5,
        "part_words_answer": 0.25,
        "part_words_rules.punctuation_no_comma": 1.0,
    }


def test_reward_part_metrics_of_a_single_source_are_computed() -> None:
    found = metrics(rows(0, "sums", {"reward_parts": {"a": 2.0}}), domains=("sums",))
    assert found == {"groups_sums": 1.0, "part_sums_a": 2.0}


def test_batch_without_reward_parts_has_no_part_metrics() -> None:
    assert metrics(rows(0, "sums", {}), domains=("sums",)) == {"groups_sums": 1.0}


def test_number_of_reward_part_metrics_is_bounded() -> None:
    """A scorer that gives each part a new name must not fill the log. The most frequent parts are kept."""
    given = [{"reward_parts": {"answer": 1.0, f"odd{number:03d}": 0.0}} for number in range(2 * MOST_PARTS)]
    found = metrics(rows(0, "sums", *given), domains=("sums",))
    parts = [name for name in found if name.startswith("part_")]
    assert len(parts) == MOST_PARTS
    assert parts[0] == "part_sums_answer"


@pytest.mark.parametrize("lengths", [(1,), (3, 0, 2), (0,)])
def test_response_length_counts_sampled_tokens(lengths: tuple[int, ...]) -> None:
    given = [
        {
            "tokens": tuple(range(size + 2)),
            "loss_mask": (False, False) + (True,) * size,
            "logprobs": (0.0,) * (size + 2),
            "versions": (-1,) * (size + 2),
        }
        for size in lengths
    ]
    found = metrics(rows(0, "sums", *given), rows(1, "words", {}))
    assert found["response_length_sums"] == pytest.approx(sum(lengths) / len(lengths))
