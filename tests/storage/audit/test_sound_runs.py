"""Tests that an audit finds no violation in valid runs, which the real scheduler and log produce on a virtual clock.

Engines and verifier are timed, so a run takes a fraction of a second. None of these is a violation: the death of an
engine, voided batches, and restarts under a newer version. The effects of alpha, filters, redundant groups and
responses, prompt sources and environments are not violations, either.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import pytest

from rollflow.storage.audit.audit import audit
from rollflow.storage.objects.memory import MemoryStore
from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.rollout.config import FilterConfig
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import Score
from tests.support.expected import expected_of
from tests.support.pipeline import Pipeline


class TwoTurns(Environment):
    """An environment that adds tokens before the first generation (a hint), between the generations (a reply), and
    after the last one.
    """

    async def play(self, episode: Episode) -> Score | None:
        """See `Environment`."""
        episode.add([7])
        if await episode.generate() is None:
            return None
        if episode.room > 2:
            episode.add([8, 9])
            if await episode.generate() is None:
                return None
        if episode.room:
            episode.add([10])
        return Score(float(len(episode.response) % 2), "parity")


DROP = {"on_stale": "drop"}
FILTER = FilterConfig(min_std=0.0)
SOUND: Mapping[str, dict[str, Any]] = {
    "alpha 0": {"async_ratio": 0.0},
    "alpha 1": {},
    "alpha 2": {"async_ratio": 2.0},
    "a fractional alpha": {"async_ratio": 1.5},
    "what is old is dropped": {"async_ratio": 2.0, "sigma": 2.0, "choices": DROP},
    "a fraction, and dropped": {"async_ratio": 0.5, "sigma": 2.0, "choices": DROP},
    "restarted in flight": {"async_ratio": 2.0, "in_flight": "restart", "sigma": 1.5},
    "restarted in flight, and dropped": {"in_flight": "restart", "sigma": 2.0, "choices": DROP},
    "age by the oldest token": {"async_ratio": 2.0, "choices": {"staleness_from": "oldest-token"}},
    "age by the oldest token, dropped": {"sigma": 2.0, "choices": {"staleness_from": "oldest-token", **DROP}},
    "a filter": {"group_size": 3, "choices": {"filter": FILTER}},
    "a filter, dropped": {"async_ratio": 2.0, "sigma": 2.0, "choices": {"filter": FILTER, **DROP}},
    "extra groups": {"choices": {"redundant_groups": 2, **DROP}},
    "extra groups at alpha 0": {"async_ratio": 0.0, "choices": {"redundant_groups": 2, **DROP}},
    "extra responses": {"choices": {"redundant_responses": 2}},
    "extra groups and responses, a filter": {
        "choices": {"redundant_groups": 2, "redundant_responses": 1, "filter": FILTER, **DROP}
    },
    "tail batching": {"async_ratio": 2.0, "sigma": 2.0, "choices": {"tail_batching": True, **DROP}},
    "several sources": {"shares": (2.0, 1.0, 1.0), "async_ratio": 2.0},
    "in the order of their start": {"async_ratio": 2.0, "choices": {"batch_order": "started"}},
    "several turns": {"environment": TwoTurns(), "async_ratio": 2.0},
    "several turns, dropped": {"environment": TwoTurns(), "sigma": 2.0, "choices": DROP},
    "engines that die": {"engines": 2, "async_ratio": 2.0, "engine_deaths": [(0.2, 0), (0.5, 1), (0.9, 0)]},
    "engines that die, restarted and dropped": {
        "engines": 2,
        "sigma": 2.0,
        "in_flight": "restart",
        "engine_deaths": [(0.2, 0), (0.5, 1), (0.9, 0)],
        "choices": DROP,
    },
    "batches that are voided": {"async_ratio": 2.0, "damage": {(2, 0): "cut", (2, 1): "gone", (4, 0): "flipped"}},
    "batches that are not finite": {"async_ratio": 2.0, "damage": {(1, 0): "not finite", (3, 0): "not finite"}},
    "voided, dropped": {"async_ratio": 3.0, "sigma": 2.0, "damage": {(3, 0): "cut"}, "choices": DROP},
}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))])
@pytest.mark.parametrize("name", SOUND)
def test_audit_of_a_correct_run_finds_no_violation(name: str, seed: int) -> None:
    pipeline = Pipeline(MemoryStore(uuid.uuid4().hex), versions=10, seed=seed, vocabulary=256, **SOUND[name])
    run_virtual(pipeline.run())
    expected = expected_of(pipeline, single_turn="environment" not in SOUND[name])
    report = audit(pipeline.store, deep=True, expected=expected)
    assert (report.violations, report.unchecked, report.versions) == ([], "", 10)
    assert audit(pipeline.store, expected=expected).violations == []
