"""Builds the limits of the rollout scheduler from a run's config."""

from __future__ import annotations

from rollflow.tasks.rollout.cache_queue import CacheLimits
from rollflow.tasks.rollout.limits import JudgingLimits, RolloutLimits
from rollflow.tasks.run.config import RunConfig


def build_limits(config: RunConfig) -> RolloutLimits:
    """Build the limits of the rollout scheduler from a run's config."""
    engine, rollout = config.engine, config.rollout
    slots = engine.max_concurrent_requests * engine.replicas
    return RolloutLimits(
        seed=config.seed,
        batches=config.versions,
        groups=config.groups,
        group_size=config.group_size,
        async_ratio=config.async_ratio,
        max_inflight_groups=rollout.max_inflight_groups or slots,
        attempts=rollout.attempts,
        max_new_tokens=engine.max_new_tokens,
        temperature=engine.temperature,
        slots=slots,
        max_unscored=rollout.max_unscored,
        max_batches_ahead=rollout.max_batches_ahead,
        redundant_groups=rollout.redundant_groups,
        redundant_responses=rollout.redundant_responses,
        tail_batching=rollout.tail_batching,
        max_preemptions=rollout.max_preemptions,
        on_stale=rollout.bound,
        batch_order=rollout.batch_order,
        staleness_from=rollout.staleness_from,
        filter=rollout.filter,
        judging={
            name: JudgingLimits(one.judge_tries, one.max_unjudged, one.compares_group, one.leaves_out)
            for name, one in config.scorers.items()
        },
        shares=tuple(source.share for source in config.prompts),
    )


def build_cache_limits(config: RunConfig) -> CacheLimits | None:
    """Build the limits by which episodes are admitted to the KV caches; return None if only slots limit episodes."""
    tokens = getattr(config.engine, "kv_tokens", None)
    if config.rollout.admit_by == "slots" or tokens is None:
        return None
    grain = getattr(config.engine, "tokens_per_tick", 1)  # one token of a simulated engine stands for several tokens
    return CacheLimits(tokens // grain, -(-getattr(config.engine, "prompt_tokens", 0) // grain))
