"""The config chooses a baseline; `test_choices`, `test_slots` and the schedules test what each baseline does."""

from __future__ import annotations

import uuid
from typing import Literal

import pytest

from rollflow.storage.audit.audit import audit
from rollflow.storage.objects.memory import MemoryStore
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.policies.config import PolicyConfig
from rollflow.tasks.rollout.baselines import BatchScheduler, WholeGroupBatches, WholeGroupProxy, WholeGroupScheduler
from rollflow.tasks.rollout.config import AnyRouting, RolloutConfig
from rollflow.tasks.rollout.proxy import InferenceProxy
from rollflow.tasks.rollout.scheduler import RolloutScheduler
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.limits import build_limits
from rollflow.tasks.runtime.clock import run_virtual
from tests.support.pipeline import Pipeline


@pytest.mark.parametrize(
    ("routing", "depth", "extra", "expected"),
    [
        ("least-work", None, 0, 40),
        ("least-work", 7, 0, 7),
        ("group", None, 0, 4),  # 20 slots of one engine hold 2 groups of 8
        ("group", None, 3, 2),  # with 3 more responses, 20 slots of one engine hold 1 group of 11
        ("group", None, 50, 2),  # a wider group has all slots of an engine
        ("group", 7, 0, 7),
    ],
)
def test_default_depth_keeps_the_engines_busy(
    routing: AnyRouting, depth: int | None, extra: int, expected: int
) -> None:
    config = RunConfig(
        policy=PolicyConfig(path="x"),
        engine=TimedEngineConfig(max_concurrent_requests=20, replicas=2),
        rollout=RolloutConfig(routing=routing, max_inflight_groups=depth, redundant_responses=extra),
    )
    assert build_limits(config).max_inflight_groups == expected


@pytest.mark.parametrize(
    ("mode", "routing", "expected"),
    [
        ("queue", "least-work", RolloutScheduler),
        ("queue", "prefix", RolloutScheduler),
        ("batch", "prefix", BatchScheduler),
        ("queue", "group", WholeGroupScheduler),
        ("batch", "group", WholeGroupBatches),
    ],
)
def test_config_chooses_the_baseline(
    mode: Literal["queue", "batch"], routing: AnyRouting, expected: type[RolloutScheduler]
) -> None:
    pipeline = Pipeline(MemoryStore(uuid.uuid4().hex), versions=2, routing=routing, choices={"mode": mode})
    run_virtual(pipeline.run())
    assert audit(pipeline.store).clean
    assert type(pipeline.scheduler) is expected
    assert type(pipeline.proxy) is (WholeGroupProxy if routing == "group" else InferenceProxy)
