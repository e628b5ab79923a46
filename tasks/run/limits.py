"""The scheduler's limits, built from a run's config."""

from __future__ import annotations

from rollflow.tasks.rollout.limits import RolloutLimits
from rollflow.tasks.run.config import RunConfig


def build_limits(config: RunConfig) -> RolloutLimits:
    """Build the scheduler's limits from a run's config."""
    engine, rollout = config.engine, config.rollout
    slots = engine.slots * engine.replicas
    return RolloutLimits(
        seed=config.seed,
        batches=config.versions,
        groups=config.groups,
        group_size=config.group_size,
        async_ratio=config.async_ratio,
        depth=rollout.depth or _default_depth(config),
        attempts=rollout.attempts,
        max_new_tokens=engine.max_new_tokens,
        temperature=engine.temperature,
        slots=slots,
        mode=rollout.mode,
        ahead=rollout.ahead,
        extra_groups=rollout.extra_groups,
        extra_responses=rollout.extra_responses,
        tail_batching=rollout.tail_batching,
        tail_after=rollout.tail_after,
        at_bound=rollout.bound,
        order=rollout.order,
        staleness=rollout.staleness,
        filter=rollout.filter,
        shares=tuple(source.share for source in config.prompts),
    )


def _default_depth(config: RunConfig) -> int:
    """Return how many groups run at a time if the config does not say: as many as the engines can hold."""
    engine, rollout = config.engine, config.rollout
    if rollout.routing == "group":
        return max(1, engine.slots // (config.group_size + rollout.extra_responses)) * engine.replicas
    return engine.slots * engine.replicas
