"""Builds the expectations of an audit of a simulated run: the scheduler's limits and the pipeline's prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollflow.storage.audit.expected import BatchLimits, Expected, ExpectedPrompts
from rollflow.storage.records import DiscardReason
from rollflow.tasks.rollout.limits import RolloutLimits, filter_reason
from tests.support.pipeline import Pipeline


def limits_for(limits: RolloutLimits, *, single_turn: bool = True) -> BatchLimits:
    """Return the limits of a scheduler. The scheduler discards slow groups as stale or redundant, and other groups by
    its filter.
    """
    left = DiscardReason.REDUNDANT if limits.redundant_groups else DiscardReason.STALE
    return BatchLimits(
        sources=len(limits.shares),
        groups=limits.groups,
        group_size=limits.group_size,
        redundant_responses=limits.redundant_responses,
        max_new_tokens=limits.max_new_tokens,
        judges_all=limits.judge_tries("") > 0,
        leave_out=frozenset(name for name, one in limits.judging.items() if one.leaves_out),
        reasons=frozenset(
            {left}
            | ({DiscardReason.UNJUDGED} if limits.judge_tries("") else set())
            | ({DiscardReason.FILTERED} if limits.filter else set())
        ),
        made_up=True,
        single_turn=single_turn,
        oldest_token=limits.staleness_from == "oldest-token",
        filtered=lambda rewards: filter_reason(limits.filter, rewards),
    )


def expected_of(pipeline: Pipeline, *, single_turn: bool = True) -> Expected:
    """Return what an audit expects of a pipeline that has run."""

    def limits(config: Mapping[str, Any]) -> BatchLimits:
        return limits_for(pipeline.scheduler.limits, single_turn=single_turn)

    return Expected(limits, ExpectedPrompts(lambda index: (pipeline._prompt(index), False), {}, pipeline.vocabulary))
