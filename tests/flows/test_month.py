"""Tests that each component of a run survives a month with one death a day, and that five deaths within ten minutes end
the run.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollflow.flows.keepalive import engines, stages
from rollflow.flows.keepalive.actors import ActorKeeper, WatchedActor
from rollflow.flows.keepalive.engines import Engines
from rollflow.flows.keepalive.restarts import RestartBudget, Restarts, RestartsExhausted
from rollflow.flows.keepalive.services import SERVER, ServiceKeeper
from rollflow.flows.keepalive.stages import Stage, Stages
from rollflow.flows.ray_cluster import cluster
from rollflow.storage.errors import EngineFailed
from rollflow.storage.objects import open_store
from rollflow.storage.run_records.recoveries import Recovery
from rollflow.tasks.actors.statuses import LearnerStatus, RolloutStatus
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.run.config import RecoveryConfig, RunConfig
from rollflow.tasks.run.context import RunContext
from tests.support.described import describe

DAY = 24 * 3600.0
DAYS = 31


class Days:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_one(self) -> None:
        self.now += DAY


@pytest.fixture
def days() -> Days:
    return Days()


@pytest.fixture
def budget(days: Days) -> RestartBudget:
    return RestartBudget(RecoveryConfig(), days)


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    config = RunConfig(engine=TimedEngineConfig(replicas=1))
    describe(open_store(str(tmp_path)), "long", config)
    return RunContext(str(tmp_path), tmp_path / "cache")


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the killing of actors."""
    monkeypatch.setattr(cluster, "kill_named", lambda *_: [])


@dataclass
class Run:
    """A flow run with the fields that stages read."""

    id: uuid.UUID = field(default_factory=uuid.uuid4)
    crashed: bool = False

    @property
    def state(self) -> Any:
        name, crashed = "Crashed" if self.crashed else "Running", self.crashed
        return SimpleNamespace(
            name=name,
            message="killed",
            is_crashed=lambda: crashed,
            is_final=lambda: crashed,
            is_running=lambda: not crashed,
            is_completed=lambda: False,
            is_paused=lambda: False,
        )


class Prefect:
    """A server that returns the same flow run for the same key, as Prefect's server does, even long after the flow
    run's end.
    """

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}

    def read_deployment_by_name(self, name: str) -> Any:
        return SimpleNamespace(id=name)

    def create_flow_run_from_deployment(self, deployment: str, *, idempotency_key: str, **_: Any) -> Run:
        return self.runs.setdefault(idempotency_key, Run())

    def run_of(self, stage: Stage) -> Run:
        return next(one for one in self.runs.values() if one.id == stage.run)

    @property
    def states(self) -> dict[uuid.UUID, Any]:
        return {run.id: run.state for run in self.runs.values()}


@pytest.fixture
def prefect(monkeypatch: pytest.MonkeyPatch) -> Prefect:
    server = Prefect()

    @contextmanager
    def api() -> Iterator[Prefect]:
        yield server

    monkeypatch.setattr(stages, "open_client", api)
    return server


def test_stage_that_dies_daily_is_restarted_for_a_month(
    context: RunContext, budget: RestartBudget, days: Days, prefect: Prefect
) -> None:
    kept = Stages(context, "a:1", print)
    kept.restarts.budget = budget
    stage = kept.all["train"]
    for _ in range(DAYS):
        with stages.open_client() as client:
            kept._update_stage(stage, client, {})  # creates the stage's flow run
            kept._update_stage(stage, client, prefect.states)
            assert stage.state == "Running"
            prefect.run_of(stage).crashed = True
            kept._update_stage(stage, client, prefect.states)
        days.pass_one()
    assert len(prefect.runs) == DAYS


def test_each_supervisor_creates_its_own_flow_runs_of_stages(context: RunContext, prefect: Prefect) -> None:
    """A run that was deleted and created again under the same name does not use flow runs of the deleted run."""
    for _ in range(2):
        kept = Stages(context, "a:1", print)
        with stages.open_client() as client:
            for stage in kept.all.values():
                kept._update_stage(stage, client, {})
    assert len(prefect.runs) == 2 * len(kept.all)


def test_lost_prefect_response_starts_no_second_flow_run(context: RunContext, prefect: Prefect) -> None:
    kept = Stages(context, "a:1", print)
    stage = kept.all["train"]
    with stages.open_client() as client:
        kept._update_stage(stage, client, {})
        stage.run = None
        kept._update_stage(stage, client, {})
    assert len(prefect.runs) == 1


def test_channel_that_dies_daily_is_restarted_for_a_month(
    context: RunContext, budget: RestartBudget, days: Days, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(stages, "start_channel", lambda *_: started.append(days.now))
    monkeypatch.setattr(stages, "begin_actors", lambda *_: [])
    kept = Stages(context, "a:1", print)
    kept.restarts.budget = budget
    monkeypatch.setattr(
        cluster, "find_actor", lambda *_: SimpleNamespace(ping=SimpleNamespace(remote=lambda *_: "asked"))
    )
    monkeypatch.setattr(cluster, "has_ended", lambda *_: True)
    answers: list[Callable[[], None]] = []
    monkeypatch.setattr(cluster, "call_within", lambda *_: answers.pop()())
    for _ in range(DAYS):
        answers += [lambda: None, dies]
        kept._look_after_channel()
        kept._look_after_channel()
        days.pass_one()
    assert started == [day * DAY for day in range(DAYS)]


@pytest.fixture
def paused(context: RunContext, days: Days, monkeypatch: pytest.MonkeyPatch) -> Stages:
    """Build a supervisor's stages with long pauses before restarts. A supervisor that slept during a pause would miss
    other deaths.
    """
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"it slept for {seconds:g} s"))
    kept = Stages(context, "a:1", print)
    kept.restarts = Restarts(RestartBudget(RecoveryConfig(restarts=3, backoff_seconds=20.0), days), days, days)
    return kept


def test_pause_of_a_stage_does_not_delay_other_stages(paused: Stages, days: Days, prefect: Prefect) -> None:
    stage, started = paused.all["train"], dict[uuid.UUID, float]()
    with stages.open_client() as client:
        for _ in range(30):
            paused._update_stage(stage, client, prefect.states)
            if stage.run is not None:
                started.setdefault(stage.run, days.now)
                prefect.run_of(stage).crashed = len(started) < 3
            days.now += 1.0
    assert list(started.values()) == [0.0, 2.0, 23.0]


def test_pause_of_the_channel_does_not_delay_other_stages(
    paused: Stages, days: Days, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[float] = []
    monkeypatch.setattr(stages, "start_channel", lambda *_: started.append(days.now))
    monkeypatch.setattr(stages, "begin_actors", lambda *_: [])
    monkeypatch.setattr(cluster, "find_actor", lambda *_: dies())
    for _ in range(63):
        paused._look_after_channel()
        days.now += 1.0
    assert started == [0.0, 21.0, 62.0]
    with pytest.raises(RestartsExhausted, match="channel was restarted 3 times"):
        paused._look_after_channel()


def dies() -> None:
    raise EngineFailed("its process is gone")


def test_actor_that_dies_daily_is_restarted_for_a_month(
    context: RunContext, budget: RestartBudget, days: Days, monkeypatch: pytest.MonkeyPatch
) -> None:
    died = 0

    def watch(self: ActorKeeper, actor: Any, tick: Any) -> str:
        nonlocal died
        if died < DAYS:
            died += 1
            days.pass_one()
            dies()
        return "done"

    monkeypatch.setattr(ActorKeeper, "_watch", watch)
    keeper = ActorKeeper(context, WatchedActor[LearnerStatus]("learner", lambda: None, lambda _: ("", 0), 1.0), print)
    keeper.restarts.budget = budget
    assert keeper.run() == "done"


def test_engine_that_dies_daily_is_restarted_for_a_month(
    context: RunContext, budget: RestartBudget, days: Days, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "node_gpus", list)
    monkeypatch.setattr(engines, "start_engine", lambda *_: dies())
    kept = Engines(context, print)
    kept.restarts.budget = budget
    for _ in range(DAYS):
        kept.look(None, RolloutStatus())
        days.pass_one()


class Fragile:
    """A service that restarts at once, and is down at every check."""

    what, log, start_seconds = "the server", Path("log"), 60.0

    def __init__(self) -> None:
        self.running = self.answers = True

    def relaunch(self) -> None:
        self.running = True


def test_service_that_dies_daily_is_restarted_for_a_month(budget: RestartBudget, days: Days) -> None:
    service, recovered = Fragile(), list[Recovery]()
    services = ServiceKeeper("none", {SERVER: service}, RecoveryConfig())  # type: ignore[dict-item]
    services.restarts.budget = budget
    for _ in range(DAYS):
        service.running = False
        services.look(recovered.append)
        services.look(recovered.append)
        days.pass_one()
    assert [one.attempt for one in recovered] == list(range(1, DAYS + 1))
