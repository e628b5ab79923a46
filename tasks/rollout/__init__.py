"""The rollout side of a run, in plain asyncio: it runs on a virtual clock as on a real one. Nothing of Ray is in it.

What is built here is chosen by the config, once: the shipped parts know nothing of the baselines. Each is loaded only
then, so that who reads the config of this room needs none.
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
    """The engines as one, as `rollout.routing` says; see `InferenceProxy`."""
    from rollflow.tasks.rollout.baselines import WholeGroupProxy
    from rollflow.tasks.rollout.proxy import InferenceProxy

    if routing == "group":
        return WholeGroupProxy(engines, slots, replacement_seconds)
    return InferenceProxy(engines, slots, replacement_seconds, routing)


def build_scheduler(
    limits: RolloutLimits, ports: SchedulerPorts, proxy: InferenceProxy, resume: ResumePoint
) -> RolloutScheduler:
    """The scheduler that `rollout.mode` names, for the proxy that `build_proxy` made."""
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
