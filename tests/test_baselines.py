"""Tests the baseline schedulers of the benchmarks: each keeps the invariants of a run, and works in the simulation."""

from __future__ import annotations

import uuid

import pytest

from benchmarks.baselines import BatchRun, BatchScheduler, WholeGroupProxy, WholeGroupRun, WholeGroupScheduler
from benchmarks.workloads import recipe, rollout_only
from rollflow.storage.audit.audit import audit
from rollflow.storage.objects.memory import MemoryStore
from rollflow.tasks.rollout.proxy import InferenceProxy
from rollflow.tasks.rollout.scheduler import RolloutScheduler
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.simulation.world import SimulatedRun, simulate
from tests.support.pipeline import Pipeline


@pytest.mark.parametrize(
    ("proxy", "scheduler"),
    [(InferenceProxy, BatchScheduler), (WholeGroupProxy, WholeGroupScheduler)],
)
def test_run_of_a_baseline_scheduler_passes_the_audit(
    proxy: type[InferenceProxy], scheduler: type[RolloutScheduler]
) -> None:
    store = MemoryStore(uuid.uuid4().hex)
    deaths = [(0.4, 0), (1.1, 0)]
    pipeline = Pipeline(store, proxy_type=proxy, scheduler_type=scheduler, engines=2, engine_deaths=deaths)
    run_virtual(pipeline.run())
    report = audit(store)
    assert report.clean
    assert report.trajectories == 6 * 4 * 2


def test_simulated_baseline_schedulers_are_slower_than_rollflow() -> None:
    hardware = rollout_only(2, 8)

    def seconds(world_type: type[SimulatedRun], **rollout: int) -> float:
        config = recipe(0, 8, 8, cap=2000, **rollout)
        return simulate(config, hardware, versions=20, world_type=world_type).figures.step_seconds

    shipped = seconds(SimulatedRun)
    assert seconds(WholeGroupRun, max_inflight_groups=2) > 1.1 * shipped
    assert seconds(BatchRun) >= shipped
