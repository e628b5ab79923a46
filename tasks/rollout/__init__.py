"""The rollout side of a run, in plain asyncio without Ray: it runs on a virtual clock as well as on a real one.

The builders here choose the implementation from the config, so that the shipped parts know nothing of the baselines.
They import it only when they are called, so that reading this folder's config loads no implementation.
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
    """Build the proxy that `rollout.routing` names; see `InferenceProxy`."""
    from rollflow.tasks.rollout.baselines import WholeGroupProxy
    from rollflow.tasks.rollout.proxy import InferenceProxy

    if routing == "group":
        return WholeGroupProxy(engines, slots, replacement_seconds)
    return InferenceProxy(engines, slots, replacement_seconds, routing)


def build_scheduler(
    limits: RolloutLimits, ports: SchedulerPorts, proxy: InferenceProxy, resume: ResumePoint
) -> RolloutScheduler:
    """Build the scheduler that `limits.mode` names, for a proxy from `build_proxy`."""
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
