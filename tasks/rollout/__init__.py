"""The rollout side of a run, in plain asyncio: it runs on a virtual clock as on a real one. Nothing of Ray is in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollflow.tasks.rollout.limits import RolloutLimits
    from rollflow.tasks.rollout.proxy import InferenceProxy
    from rollflow.tasks.rollout.scheduler import ResumePoint, RolloutScheduler, SchedulerPorts


def build_scheduler(
    limits: RolloutLimits, ports: SchedulerPorts, proxy: InferenceProxy, resume: ResumePoint
) -> RolloutScheduler:
    """The scheduler that `rollout.mode` names, loaded only then: who reads the config of this room needs none."""
    from rollflow.tasks.rollout.baselines import BatchScheduler
    from rollflow.tasks.rollout.scheduler import RolloutScheduler

    kind = BatchScheduler if limits.mode == "batch" else RolloutScheduler
    return kind(limits, ports, proxy, resume)
