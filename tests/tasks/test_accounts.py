"""Compares the scheduler's counters and memory with the events that a subclass of the scheduler records."""

from __future__ import annotations

import uuid
from collections import Counter
from typing import Any

import pytest

from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import Discard, DiscardReason, TrajectoryGroup
from rollflow.tasks.rollout.config import FilterConfig
from rollflow.tasks.rollout.group import GroupRollout
from rollflow.tasks.rollout.scheduler import RolloutScheduler
from rollflow.tasks.runtime.clock import run_virtual
from tests.support.pipeline import Pipeline


class Seen(RolloutScheduler):
    """A scheduler that records its events."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gone: list[Discard] = []
        self.scored: list[TrajectoryGroup] = []
        self.kept = self.made = 0

    async def _count_response(self, tokens: int) -> None:
        self.made += tokens
        await super()._count_response(tokens)

    def _discard(self, discard: Discard) -> None:
        self.gone.append(discard)
        super()._discard(discard)

    def _add_scored(self, group: TrajectoryGroup, rollout: GroupRollout) -> None:
        self.scored.append(group)
        before = len(self.buffer)
        super()._add_scored(group, rollout)
        self.kept += len(self.buffer) - before


@pytest.fixture(scope="module")
def seen() -> Seen:
    """Return the scheduler of a run in which some groups are too slow, redundant or filtered, and some responses are
    surplus.
    """
    choices = {
        "redundant_groups": 2,
        "redundant_responses": 1,
        "on_stale": "drop",
        "filter": FilterConfig(min_mean=0.0),
    }
    common: dict[str, Any] = {"versions": 12, "slots": 16, "sigma": 1.5, "train_seconds": 0.05}
    pipeline = Pipeline(MemoryStore(uuid.uuid4().hex), scheduler_type=Seen, choices=choices, **common)
    run_virtual(pipeline.run())
    assert isinstance(pipeline.scheduler, Seen)
    return pipeline.scheduler


def test_scheduler_counts_generated_tokens_and_trajectories(seen: Seen) -> None:
    counts = seen.counts
    assert counts.tokens == seen.made > 0
    assert counts.discards == Counter(one.reason for one in seen.gone)
    assert min(counts.discards[reason] for reason in (DiscardReason.REDUNDANT, DiscardReason.FILTERED)) > 1
    assert counts.discarded_tokens == sum(one.response_tokens for one in seen.gone)
    assert counts.dropped_tokens == sum(one.response_tokens for one in seen.gone if one.slow)
    assert 0 < counts.dropped_tokens < counts.discarded_tokens
    assert counts.filtered == {"mean reward at or below 0": counts.discards[DiscardReason.FILTERED]}
    assert counts.surplus_tokens == sum(group.surplus_tokens for group in seen.scored) > 0
    assert counts.trajectories == 2 * seen.kept
    assert seen.kept > 12 * 4


def test_scheduler_frees_the_memory_of_ended_groups(seen: Seen) -> None:
    assert seen._aborts == set()
    assert seen._left_behind <= set(seen._running.values())
    assert seen.running == len(seen._running)
    assert 0 <= seen._generating == sum(rollout.unanswered for rollout in seen._running.values())
