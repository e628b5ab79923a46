"""The rollout side of a run, in plain asyncio without Ray: this code runs on a virtual clock as well as on a real one.

`build_proxy` and `build_scheduler` choose the implementation from the config, so the shipped classes do not import the
baselines. Both functions import an implementation only when they are called, so that importing this folder's config
loads no implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollflow.tasks.engines.base import Engine
    from rollflow.tasks.rollout.config import AnyRouting
    from rollflow.tasks.rollout.limits import RolloutLimits
    from rollflow.tasks.rollout.proxy import InferenceProxy
    from rollflow.tasks.rollout.scheduler import ResumePoint, RolloutScheduler, SchedulerPorts


def build_proxy(
    engines: Sequence[Engine], slots: int, replacement_seconds: float, routing: AnyRouting
) -> InferenceProxy:
    """Build the proxy for the value of `rollout.routing`; see `InferenceProxy`."""
    from rollflow.tasks.rollout.baselines import WholeGroupProxy
    from rollflow.tasks.rollout.proxy import InferenceProxy

    if routing == "group":
        return WholeGroupProxy(engines, slots, replacement_seconds)
    return InferenceProxy(engines, slots, replacement_seconds, routing)


def build_scheduler(
    limits: RolloutLimits, ports: SchedulerPorts, proxy: InferenceProxy, resume: ResumePoint
) -> RolloutScheduler:
    """Build the scheduler for the value of `limits.mode`, on a proxy from `build_proxy`."""
    from rollflow.tasks.rollout.baselines import (
        BatchScheduler,
        WholeGroupBatches,
        WholeGroupProxy,
        WholeGroupScheduler,
    )
    from rollflow.tasks.rollout.scheduler import RolloutScheduler

    kind: type[RolloutScheduler]
    if isinstance(proxy, WholeGroupProxy):
        kind = WholeGroupBatches if limits.mode == "batch" else WholeGroupScheduler
    else:
        kind = BatchScheduler if limits.mode == "batch" else RolloutScheduler
    return kind(limits, ports, proxy, resume)
