"""Tests that a dead engine's Ray actor is restarted, or only the engine within a living actor, and that each restart is
recorded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from rollflow.flows.keepalive.engines import Engines
from rollflow.flows.keepalive.prestart import begin_actors
from rollflow.flows.keepalive.restarts import RestartBudget, RestartsExhausted
from rollflow.flows.ray_cluster import cluster
from rollflow.storage.errors import StoreFailed
from rollflow.storage.objects import open_store
from rollflow.storage.run_records.recoveries import RecoveryLog
from rollflow.tasks.actors.learner import LEARNER
from rollflow.tasks.actors.reward import REWARD
from rollflow.tasks.actors.rollout import ROLLOUT
from rollflow.tasks.actors.run_engines import EVALUATION, engine_name
from rollflow.tasks.actors.statuses import RolloutStatus
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.rollout.config import EvaluationConfig
from rollflow.tasks.run.config import RecoveryConfig, RunConfig
from rollflow.tasks.run.context import RunContext
from tests.support.described import describe
from tests.support.lives import Joins
from tests.support.waiting import HANG_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_node")]
QUIET = RolloutStatus()


class Kept:
    """Two timed engines, their keeper, and a scheduler that they join."""

    def __init__(self, folder: Path, before: Callable[[RunContext], None] = lambda _: None) -> None:
        recovery = RecoveryConfig(restarts=5, backoff_seconds=0.01)
        evaluation = EvaluationConfig(engine="own")
        config = RunConfig(engine=TimedEngineConfig(replicas=2), recovery=recovery, evaluation=evaluation)
        describe(open_store(str(folder)), "kept", config)
        self.context = RunContext(str(folder), folder / "cache")
        before(self.context)
        self.engines = Engines(self.context, print)
        self.scheduler = ray.remote(Joins).options(num_cpus=0).remote()
        self.engines.start()
        self.until(lambda: len(self.joined) == 2)

    @property
    def joined(self) -> list[int]:
        return [e.number for e in (*self.engines._engines, *self.engines._evaluating) if e.joined]

    @property
    def recovered(self) -> list[str]:
        return [recovery.role for recovery in RecoveryLog(self.context.store).read()]

    def until(self, done: Callable[[], bool], status: RolloutStatus = QUIET) -> None:
        deadline = time.monotonic() + HANG_SECONDS
        while not done():
            assert time.monotonic() < deadline, (self.joined, self.recovered)
            self.engines.look(self.scheduler, status)
            time.sleep(0.05)


def process(number: int) -> int:
    return int(answer(ray.get_actor(engine_name(number)).__ray_call__.remote(lambda _: os.getpid())))


def answer(reference: Any) -> Any:
    return ray.get(reference, timeout=HANG_SECONDS)


def die(actor: Any) -> None:
    """Make the engine die within its living Ray actor, as vLLM's own process may die."""
    answer(actor.__ray_call__.remote(lambda self: setattr(self._engine, "_dead", "its core died")))


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    yield Kept(tmp_path)
    cluster.kill_named([engine_name(0), engine_name(1), engine_name(EVALUATION)])


def test_supervisor_finds_engines_that_were_started_early(tmp_path: Path) -> None:
    begun = list[int]()

    def begin(context: RunContext) -> None:
        begin_actors(context, "")
        begun.extend(process(number) for number in range(2))

    try:
        kept = Kept(tmp_path, begin)
        assert [process(number) for number in range(2)] == begun
        assert kept.recovered == []
    finally:
        cluster.kill_named([engine_name(0), engine_name(1), LEARNER, ROLLOUT, REWARD])


def test_evaluation_engine_starts_when_needed_and_restarts(kept: Kept) -> None:
    for _ in range(5):
        kept.engines.look(kept.scheduler, QUIET)
    with pytest.raises(ValueError, match="engine-evaluation"):
        ray.get_actor(engine_name(EVALUATION))
    due = RolloutStatus(evaluations_due=1)
    kept.until(lambda: kept.joined == [0, 1, EVALUATION], due)
    before = process(EVALUATION)
    cluster.kill_named([engine_name(EVALUATION)])
    kept.until(lambda: EVALUATION not in kept.joined, due)
    kept.until(lambda: kept.joined == [0, 1, EVALUATION], due)
    assert process(EVALUATION) != before
    kept.until(lambda: kept.recovered == ["engine-evaluation"], due)


def test_dead_engine_is_restarted_without_restarting_its_actor(kept: Kept) -> None:
    before = process(1)
    actor = ray.get_actor(engine_name(1))
    die(actor)
    kept.until(lambda: kept.recovered == ["engine-1"])
    assert process(1) == before
    answer(actor.health.remote())
    assert kept.joined == [0, 1]


def test_engine_that_the_scheduler_removed_is_restarted(kept: Kept) -> None:
    before = process(0)
    kept.until(lambda: 0 not in kept.joined, RolloutStatus(failed={0: "it generated no token for 60 s"}))
    kept.until(lambda: kept.recovered == ["engine-0"])
    assert process(0) != before
    [recovery] = RecoveryLog(kept.context.store).read()
    assert recovery.reason == "it generated no token for 60 s"


def test_health_report_from_before_a_failure_is_ignored(kept: Kept) -> None:
    before = process(1)
    kept.until(lambda: kept.engines._engines[1].health is not None)
    # after this answer, the keeper's earlier health check was answered, too: the engine was healthy at that time
    answer(ray.get_actor(engine_name(1)).health.remote())
    actor = ray.get_actor(engine_name(1))
    die(actor)
    kept.until(lambda: 1 not in kept.joined, RolloutStatus(failed={1: "its core died"}))
    kept.until(lambda: kept.recovered == ["engine-1"])
    assert process(1) == before


def test_exhausted_engine_restart_budget_is_reported_once(kept: Kept) -> None:
    kept.engines.restarts.budget = RestartBudget(RecoveryConfig(restarts=0))
    actor = ray.get_actor(engine_name(1))
    die(actor)
    with pytest.raises(RestartsExhausted) as caught:
        kept.until(lambda: False)
    assert str(caught.value).count("engine-1 was restarted") == 1


def test_full_disk_does_not_use_an_engines_restart_budget(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(recovery: object) -> None:
        raise StoreFailed("the disk is full")

    monkeypatch.setattr(kept.engines.reporter, "report_recovery", full)
    actor = ray.get_actor(engine_name(1))
    die(actor)
    with pytest.raises(StoreFailed, match="the disk is full"):
        kept.until(lambda: False)


def test_engine_death_with_the_scheduler_is_recorded(kept: Kept) -> None:
    before = process(1)
    cluster.kill_named([engine_name(1)])
    kept.engines.start()  # the flow calls `start` before each new scheduler
    kept.until(lambda: kept.recovered == ["engine-1"])
    assert process(1) != before
    kept.until(lambda: kept.joined == [0, 1])
