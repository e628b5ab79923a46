"""Tests that a supervisor is stuck if it writes no status although the store can be read, and that a crashed supervisor
is restarted.
"""

from __future__ import annotations

import contextlib
import errno
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.states import Cancelled, Crashed, Failed, Paused, Scheduled, Suspended

from rollflow.flows import post_training
from rollflow.flows.commands import run as run_command
from rollflow.flows.keepalive import supervisor as supervisor_module
from rollflow.flows.keepalive import supervisor_restart as crashed_module
from rollflow.flows.keepalive.restarts import RestartsExhausted
from rollflow.flows.keepalive.run_watch import RunWatch
from rollflow.flows.keepalive.supervisor import AWAY, SupervisorKeeper
from rollflow.flows.views.status import RunStatus
from rollflow.storage.errors import Unreachable
from rollflow.storage.objects import open_store
from rollflow.storage.objects.base import UnfinishedWrite
from rollflow.storage.objects.local import LocalStore
from rollflow.tasks.run.config import RecoveryConfig, RunConfig
from rollflow.tasks.run.context import RunContext
from tests.support.described import describe

RUNNING = State(type=StateType.RUNNING)


class Clock(SimpleNamespace):
    """A clock that stands still until it is set."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


def test_supervisor_with_unreadable_status_is_not_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig()
    describe(open_store(str(tmp_path)), "long", config)
    clock, crashes, answers = Clock(), list[str](), list[RunStatus | None]()

    def read(*_: Any) -> RunStatus | None:
        if not answers:
            raise Unreachable("object storage did not answer")
        return answers.pop()

    monkeypatch.setattr(supervisor_module, "time", clock)
    monkeypatch.setattr(supervisor_module, "read_status", read)
    monkeypatch.setattr(supervisor_module, "flow_state", lambda _: RUNNING)
    monkeypatch.setattr(SupervisorKeeper, "_mark_crashed", lambda self, reason: crashes.append(reason))
    monkeypatch.setattr(SupervisorKeeper, "_restart_supervisor", lambda self, status: status)
    services: Any = SimpleNamespace(look=lambda _: None, cluster_lost_at=0.0, services={})
    followed = SupervisorKeeper(RunContext(str(tmp_path), tmp_path), uuid4(), services)
    status = RunStatus("long", "training", seconds=5.0)

    def looks(seconds: float) -> None:
        nonlocal status
        until = clock.now + seconds
        while clock.now < until:
            clock.now += 10.0
            status = followed.look(followed.read(status))

    looks(10 * config.rollout.patience_seconds)
    assert crashes == []
    assert status.messages == (AWAY,)
    answers += [RunStatus("long", "training", seconds=5.0)] * 100  # the status can be read again, and does not change
    looks(config.rollout.patience_seconds + 10)
    assert crashes == ["it wrote no status for too long (phase: training)"]


@pytest.mark.parametrize("state", [Scheduled(), RUNNING], ids=["no runner takes it", "it runs"])
@pytest.mark.parametrize("phase", ["starting", "cold start", "training", "evaluating", "ending"])
def test_supervisor_without_progress_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: Any, state: State
) -> None:
    config = RunConfig()
    describe(open_store(str(tmp_path)), "long", config)
    clock, crashes = Clock(), list[str]()
    successor = SimpleNamespace(flow_run=uuid4(), pending=None, check_up=lambda: True)
    monkeypatch.setattr(supervisor_module, "time", clock)
    monkeypatch.setattr(supervisor_module, "flow_state", lambda _: state)
    monkeypatch.setattr(SupervisorKeeper, "_mark_crashed", lambda self, reason: crashes.append(reason))
    monkeypatch.setattr(crashed_module, "restart_supervisor", lambda *_: successor)
    services: Any = SimpleNamespace(look=lambda _: None, cluster_lost_at=0.0, services={})
    followed = SupervisorKeeper(RunContext(str(tmp_path), tmp_path), uuid4(), services)
    longest = config.rollout.patience_seconds + config.recovery.window_seconds
    for second in range(0, 3 * round(longest), 10):  # the supervisor makes progress now and then
        clock.now += 10.0
        followed.look(RunStatus("long", phase, seconds=second // 500))
    assert crashes == []
    while not crashes and clock.now < 5 * longest:
        clock.now += 10.0
        status = followed.look(RunStatus("long", phase, seconds=7.0))
    assert crashes == [f"it wrote no status for too long (phase: {phase})"]
    assert status.phase == "starting"
    followed.look(RunStatus("long", phase, seconds=7.0))  # the restarted supervisor has the same time again
    assert len(crashes) == 1


def test_supervisor_that_hangs_after_the_run_is_not_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user stopped the run, but its flow run does not end."""
    config = RunConfig()
    describe(open_store(str(tmp_path)), "long", config)
    clock = Clock()
    monkeypatch.setattr(supervisor_module, "time", clock)
    monkeypatch.setattr(supervisor_module, "flow_state", lambda _: RUNNING)
    services: Any = SimpleNamespace(look=lambda _: None, cluster_lost_at=0.0, services={})
    followed = SupervisorKeeper(RunContext(str(tmp_path), tmp_path), uuid4(), services)
    stopped = RunStatus("long", "stopped", seconds=7.0)
    assert followed.look(stopped).phase == "ending"
    clock.now += config.rollout.patience_seconds + config.recovery.window_seconds + 1.0
    assert followed.look(stopped).phase == "stopped"


@pytest.mark.parametrize(
    ("state", "phase", "ended"),
    [(Cancelled(), "stopped", True), (Suspended(), "paused", False), (Paused(), "paused", False)],
)
def test_pause_or_cancel_by_the_user_is_not_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: State, phase: str, *, ended: bool
) -> None:
    """Only a user's resumption restarts a paused run, however long the pause is."""
    config = RunConfig()
    describe(open_store(str(tmp_path)), "long", config)
    clock = Clock()
    monkeypatch.setattr(supervisor_module, "time", clock)
    monkeypatch.setattr(supervisor_module, "flow_state", lambda _: state)
    services: Any = SimpleNamespace(look=lambda _: None, cluster_lost_at=0.0, services={})
    followed = SupervisorKeeper(RunContext(str(tmp_path), tmp_path), uuid4(), services)
    for _ in range(3):
        clock.now += config.rollout.patience_seconds
        status = followed.look(RunStatus("long", "training", version=3, seconds=5.0))
        assert (status.phase, status.ended, status.version) == (phase, ended, 3)


def test_unreachable_storage_of_one_run_delays_no_other_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """`rollflow serve` checks all crashed runs in turn."""
    here, told, away = uuid4(), list[str](), ["s3://bucket/runs/first"]
    crashed = [
        SimpleNamespace(id=uuid4(), deployment_id=here, state_type="CRASHED", name=name, parameters={"storage": uri})
        for name, uri in (("first", away[0]), ("second", "/a/folder/runs/second"))
    ]
    client = SimpleNamespace(read_deployments=lambda **_: [SimpleNamespace(id=here)])

    @contextlib.contextmanager
    def api() -> Iterator[Any]:
        yield client

    def restart_supervisor(flow_run: UUID, context: RunContext) -> Any:
        if context.uri in away:
            raise Unreachable("object storage did not answer")
        return crashed_module.Successor(context, flow_run, crashed_module.PendingRecovery("supervisor", "killed", 1))

    monkeypatch.setattr(crashed_module, "open_client", api)
    monkeypatch.setattr(crashed_module, "list_supervisors", lambda *_: crashed)
    monkeypatch.setattr(crashed_module, "restart_supervisor", restart_supervisor)
    monkeypatch.setattr(crashed_module.Successor, "check_up", lambda _: False)
    pick_up = crashed_module.SupervisorRestarter("rollflow")
    pick_up.look(told.append)
    pick_up.look(told.append)
    assert told == ["run second is restarted: killed"]
    away.clear()
    pick_up.look(told.append)
    assert told == ["run second is restarted: killed", "run first is restarted: killed"]


def test_old_run_is_restarted_despite_many_newer_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Prefect server returns a limited number of flow runs at once, and all runs of a run home share a database."""
    config = {"config": RunConfig().model_dump(mode="json")}

    def supervisor(number: int) -> Any:
        state, parameters = Crashed(message="killed"), config | {"storage": f"{tmp_path}/runs/run-{number}"}
        created = datetime.fromtimestamp(number, UTC)
        return FlowRun(
            flow_id=uuid4(), deployment_id=uuid4(), name="it", created=created, state=state, parameters=parameters
        )

    there = [supervisor(number) for number in reversed(range(450))]
    client = SimpleNamespace(
        read_flow_runs=lambda limit, offset=0, **_: there[offset : offset + limit],
        create_flow_run_from_deployment=lambda *_, **named: SimpleNamespace(
            id=named["idempotency_key"], state=named["state"]
        ),
    )
    monkeypatch.setattr(crashed_module, "open_client", lambda: contextlib.nullcontext(client))
    oldest = there[-1]
    successor = crashed_module.restart_supervisor(oldest.id, RunContext(f"{tmp_path}/runs/run-0", tmp_path))
    assert successor is not None
    assert str(successor.flow_run) == f"after:{oldest.id}"


def test_user_restart_resets_the_supervisor_restart_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count of restarts is reset, too, for a run that no command follows, because an automation does not know who
    started the run.
    """
    config = {"config": RunConfig(recovery=RecoveryConfig(restarts=2)).model_dump(mode="json")}
    there: list[FlowRun] = []

    def supervisor(state: State, after: FlowRun | None = None) -> FlowRun:
        number = len(there)
        one = FlowRun(
            flow_id=uuid4(),
            deployment_id=uuid4(),
            name="it",
            created=datetime.fromtimestamp(number, UTC),
            end_time=datetime.now(UTC),
            state=state,
            parameters=config | {"storage": f"{tmp_path}/runs/run"},
            idempotency_key=f"after:{after.id}" if after else uuid4().hex,
        )
        there.insert(0, one)
        return one

    def follow_up(one: FlowRun) -> Any:
        return crashed_module.restart_supervisor(one.id, RunContext(f"{tmp_path}/runs/run", tmp_path))

    client = SimpleNamespace(
        read_flow_runs=lambda limit, offset=0, **_: there[offset : offset + limit],
        create_flow_run_from_deployment=lambda *_, **named: SimpleNamespace(
            id=named["idempotency_key"], state=named["state"]
        ),
        set_flow_run_state=lambda *_, **__: None,
    )
    monkeypatch.setattr(crashed_module, "open_client", lambda: contextlib.nullcontext(client))
    second = supervisor(Crashed(), after=supervisor(Crashed()))
    supervisor(Failed(message="over the budget"), after=second)
    one = supervisor(Crashed())  # a supervisor that a user started
    assert follow_up(one).pending.attempt == 3
    two = supervisor(Crashed(), after=one)
    assert follow_up(two).pending.attempt == 4
    last = supervisor(Crashed(), after=two)
    with pytest.raises(RestartsExhausted, match="restarted 2 times"):
        follow_up(last)


@pytest.fixture
def patient(tmp_path: Path) -> RunContext:
    """Make a run that waits for its store for three seconds."""
    config = {"store": {"patience_seconds": 3.0}}
    context = RunContext(str(tmp_path / "runs/run"), tmp_path)
    describe(context.store, "run", config)
    return context


class Watched:
    """A made-up status writer and log writer. Each call raises the next error in `looks`, or succeeds for None. If the
    last item of `looks` is an error, it is raised again and again.
    """

    paused = False

    def __init__(self, context: RunContext, *looks: Exception | None) -> None:
        self.context, self._looks = context, list(looks)

    def have_ended(self, *_: str) -> bool:
        return not self._looks

    def look(self) -> None:
        pass

    def check(self) -> None:
        error = self._looks.pop(0) if len(self._looks) > 1 or self._looks == [None] else self._looks[0]
        if error is not None:
            raise error

    def refresh(self) -> None:
        pass


@pytest.mark.long
def test_supervisor_survives_a_temporarily_unreadable_folder(patient: RunContext) -> None:
    away, stale = Unreachable("it cannot be read now"), OSError(errno.ESTALE, "Stale file handle")
    watched: Any = Watched(patient, None, away, stale, None)
    RunWatch(watched, watched, watched).to_end()
    watched = Watched(patient, None, away)
    began = time.monotonic()
    with pytest.raises(Unreachable, match="it cannot be read now"):
        RunWatch(watched, watched, watched).to_end()
    assert time.monotonic() - began >= 3.0


@pytest.mark.parametrize("error", [OSError(errno.ENOSYS, "NotImplemented"), Unreachable("no answer")])
def test_s3_service_without_upload_listing_is_accepted(
    error: Exception, patient: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some S3 services do not list started uploads, or do not allow everybody to list them."""

    def unfinished(_: LocalStore) -> Iterator[UnfinishedWrite]:
        raise error

    warnings: list[str] = []
    monkeypatch.setattr(LocalStore, "list_unfinished", unfinished)
    monkeypatch.setattr(
        post_training, "get_run_logger", lambda: SimpleNamespace(warning=lambda text, e: warnings.append(text % e))
    )
    post_training._sweep(patient)
    assert len(warnings) == 1


def test_run_end_is_shown_when_the_store_answers_again(
    patient: RunContext, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The store is unreachable after the last version, for longer than a reading command would wait."""
    summary = {"run_id": "run", "versions": 7, "audit": "clean"}
    patient.store.put("summary.json", json.dumps(summary).encode())

    def opened(uri: str, patience: float | None = None) -> LocalStore:
        return LocalStore(Path(uri)) if patience == 3.0 else Away(Path(uri))

    class Away(LocalStore):
        def get(self, path: str) -> bytes:
            if path == "summary.json":
                raise Unreachable("object storage did not answer")
            return super().get(path)

    @contextlib.contextmanager
    def session(*_: object) -> Iterator[None]:
        yield

    monkeypatch.setattr("rollflow.tasks.run.context.open_store", opened)
    monkeypatch.setattr("rollflow.flows.commands.run.session_of", session)
    monkeypatch.setattr(run_command, "_show", lambda *_: RunStatus("run", "done"))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert run_command.drive(RunContext(patient.uri, patient.cache)) == 0
    printed = capsys.readouterr().out
    assert "object storage did not answer; waiting for it" in printed
    assert "clean" in printed
