"""Tests that dead or hanging actors are restarted from storage, and that restarts are limited and recorded."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rollflow.flows import post_training
from rollflow.flows.keepalive.actors import ActorKeeper, SupervisorGone, WatchedActor
from rollflow.flows.keepalive.restarts import PendingRecovery, RestartBudget, RestartsExhausted
from rollflow.flows.post_training import _finish, _give_up
from rollflow.flows.ray_cluster import cluster
from rollflow.flows.views.progress import RunProgress
from rollflow.storage.audit.report import AuditReport
from rollflow.storage.errors import Conflict, NotFinite, RollflowError, StoreFailed, Unreachable
from rollflow.storage.log.run_log import Log, Writer
from rollflow.storage.log.state import Superseded
from rollflow.storage.objects import open_store
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.policies import PolicyStore, PolicyVersion
from rollflow.storage.run_records.recoveries import Recovery, RecoveryLog
from rollflow.tasks.actors.statuses import RewardStatus, RolloutStatus
from rollflow.tasks.run.cluster_config import ClusterConfig
from rollflow.tasks.run.config import RecoveryConfig, RunConfig
from rollflow.tasks.run.context import RunContext
from tests.support.batches import begin, train
from tests.support.described import describe
from tests.support.lives import Worker
from tests.support.waiting import HANG_SECONDS


def test_first_restart_is_immediate_and_later_pauses_double() -> None:
    now = [0.0]
    budget = RestartBudget(RecoveryConfig(restarts=4, window_seconds=100, backoff_seconds=1.0), lambda: now[0])
    assert [budget.spend("learner", "gone") for _ in range(4)] == [0.0, 1.0, 2.0, 4.0]
    assert budget.spend("rollout", "gone") == 0.0  # restarts of the learner do not count for the role rollout
    with pytest.raises(
        RestartsExhausted, match=r"learner was restarted 4 times within 100 s, .* ended again: no memory"
    ):
        budget.spend("learner", "no memory")
    now[0] = 101.0
    assert budget.spend("learner", "gone") == 0.0


def test_recovery_times_stay_in_order_if_the_clock_steps_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pending, real = PendingRecovery("learner", "gone", 1), time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600.0)
    assert not pending.note_progress(1.0)
    assert pending.note_progress(2.0)
    first = pending.finish_recovery()
    assert first.noticed_at <= first.restored_at <= first.resumed_at
    later = PendingRecovery("learner", "gone again", 2).after(pending).finish_recovery()
    assert first.noticed_at == later.noticed_at <= later.resumed_at


def test_tokens_per_second_are_zero_if_the_clock_steps_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = RunProgress(RunContext(str(tmp_path), tmp_path / "cache"))
    for number, at in enumerate((5000.0, 5001.0, 1402.0)):
        metrics = {"response_tokens": 100.0}
        progress.versions.append(PolicyVersion(number, number, 0, at, None, (), (), (), metrics, ""))
    monkeypatch.setattr(PolicyStore, "find", lambda _, number: progress.versions[number])
    assert progress.training_seconds == 0.0
    assert progress.tokens_per_second == progress.tokens_per_second_now == 0.0


def test_second_supervisor_replaces_the_first(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    describe(store)
    first = Log(store).claim("supervisor", who="flow run 1", cluster="a:1")
    first.check()
    second = Log(store).claim("supervisor", who="flow run 2", cluster="b:1")
    with pytest.raises(Conflict, match="another supervisor now \\(flow run 2"):
        first.check()
    second.check()
    assert first.log.state.claims["supervisor"].cluster == "b:1"


pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_node")]


def keep(
    tmp_path: Path, lives: str, restarts: int = 5, answer: float = 30.0, patience: float = 5.0, lease: float = 600.0
) -> tuple[RunContext, Any]:
    """Run a worker actor under a keeper; `lives` says how each of its processes behaves. Return the run and the
    worker's result.
    """
    recovery = RecoveryConfig(restarts=restarts, backoff_seconds=0.01, answer_seconds=answer)
    config = RunConfig(recovery=recovery, cluster=ClusterConfig(lease_seconds=lease))
    describe(open_store(str(tmp_path)), "kept", config)
    return keep_on(tmp_path, lives, patience)


def keep_on(tmp_path: Path, lives: str, patience: float = 5.0) -> tuple[RunContext, Any]:
    """Run a worker actor of an existing run under a keeper; return the run and the worker's result."""
    (tmp_path / "lives").write_text(lives)
    context = RunContext(str(tmp_path), tmp_path / "cache")
    options = {"name": "worker", "lifetime": "detached", "get_if_exists": True, "max_concurrency": 4, "num_cpus": 0}
    watched = WatchedActor[RewardStatus](
        name="worker",
        start=lambda: ray.remote(Worker).options(**options).remote(tmp_path),
        redone=lambda status: (f"{status.scored} pieces", 3),
        patience=patience,
    )
    try:
        return context, ActorKeeper(context, watched, print).run()
    finally:
        cluster.kill_named(["worker"])


def test_actor_is_restarted_after_death_error_or_hang(tmp_path: Path) -> None:
    context, result = keep(tmp_path, "die raise hang work")
    assert result == "done"
    [recovery] = RecoveryLog(context.store).read()  # deaths in a row without progress between them are one recovery
    assert recovery.role == "worker"
    died, raised, hung = recovery.reason.split("; then ")
    assert "its process is gone" in died
    assert raised == "somebody else published version 3"
    seen = dict.fromkeys(("scored", "timeouts", "kills", "rechecked", "false_kills"), 0)
    assert hung == f"the actor made no progress for 5 s; its last reported progress: {seen}"
    assert recovery.attempt == 3
    assert recovery.noticed_at <= recovery.restored_at <= recovery.resumed_at


def test_actor_is_not_restarted_without_a_supervisor(tmp_path: Path) -> None:
    with pytest.raises(
        SupervisorGone, match=r"no supervisor has watched .* for 2 s .*; continue the run with: rollflow resume"
    ):
        keep(tmp_path, "hang", patience=HANG_SECONDS, lease=2.0)
    assert RecoveryLog(open_store(str(tmp_path))).read() == []


def test_busy_actor_that_does_not_answer_is_not_restarted(tmp_path: Path) -> None:
    """The actor is silent for several times the allowed time, because a library computes and holds Python's lock."""
    context, result = keep(tmp_path, "busy", restarts=0, answer=2.0, patience=HANG_SECONDS)
    assert result == "done"
    assert RecoveryLog(context.store).read() == []


def test_idle_actor_that_does_not_answer_is_restarted(tmp_path: Path) -> None:
    context, result = keep(tmp_path, "deaf work", answer=3.0, patience=HANG_SECONDS)
    assert result == "done"
    [recovery] = RecoveryLog(context.store).read()
    assert recovery.reason.startswith("the process of worker hangs: it uses no CPU time")


@pytest.mark.soak
def test_busy_actor_without_progress_is_restarted(tmp_path: Path) -> None:
    with pytest.raises(RestartsExhausted, match="no progress for 4 s"):
        keep(tmp_path, "busy", restarts=0, answer=2.0, patience=4.0)


def test_recovery_is_recorded_once_storage_answers_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append, failures = RecoveryLog.append, [Unreachable("object storage did not answer")] * 2

    def away(self: RecoveryLog, recovery: Recovery) -> int:
        if failures:
            raise failures.pop()
        return append(self, recovery)

    monkeypatch.setattr(RecoveryLog, "append", away)
    context, result = keep(tmp_path, "die work die", restarts=1)
    assert result == "done"
    assert [recovery.attempt for recovery in RecoveryLog(context.store).read()] == [1]


def test_actor_restarted_too_often_fails_with_the_last_reason(tmp_path: Path) -> None:
    with pytest.raises(RestartsExhausted, match=r"worker was restarted 2 times .* somebody else published version 3"):
        keep(tmp_path, "raise", restarts=2)


def test_new_keeper_counts_the_restarts_of_earlier_keepers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new keeper starts, for example, when a stage's flow is killed each time its actor has restarted."""
    monkeypatch.setattr(
        "rollflow.flows.keepalive.restart_history.WAIT_SECONDS", HANG_SECONDS
    )  # the keeper waits for the records even on a busy machine
    keep(tmp_path, "raise work", restarts=2)
    keep_on(tmp_path, "raise work")
    assert [one.attempt for one in RecoveryLog(open_store(str(tmp_path))).read()] == [1, 2]
    with pytest.raises(RestartsExhausted, match="worker was restarted 2 times within 600 s"):
        keep_on(tmp_path, "raise work")


def test_actor_is_not_restarted_after_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(StoreFailed, match="free space, then resume the run"):
        keep(tmp_path, "full work")  # a second start of the worker would succeed


def test_actor_is_not_restarted_after_a_deterministic_failure(tmp_path: Path) -> None:
    """A version is a function of its parent and its batch, so a retry would fail again."""
    with pytest.raises(NotFinite, match="grad_norm of batch 2 is nan"):
        keep(tmp_path, "nan work")


def test_actor_replaced_by_a_newer_actor_is_not_restarted(tmp_path: Path) -> None:
    with pytest.raises(Superseded, match="which is another one"):
        keep(tmp_path, "superseded work")
    assert RecoveryLog(open_store(str(tmp_path))).read() == []


def test_actor_whose_role_a_dead_process_took_is_restarted(tmp_path: Path) -> None:
    _, result = keep(tmp_path, "deposed work")
    assert result == "done"


# --- the end of a supervisor -------------------------------------------------------------------------------------


def supervised(store: MemoryStore, done: list[str]) -> tuple[Writer, Any, Any]:
    """Build a supervisor's log writer on Ray cluster A, its stages, and its status writer. The last two record their
    calls in `done`.
    """
    stages = SimpleNamespace(
        address="A",
        abandon=lambda: done.append("stages ended"),
        statuses=dict,
        rollout=RolloutStatus(),
    )
    nothing = {"log_reward_plot": lambda *_: None, "log_ending": lambda *_: None, "log_anchor": lambda *_: None}
    tracker = SimpleNamespace(page="", finish=done.append, **nothing)
    writer = SimpleNamespace(tracker=tracker, refresh=done.append, failure="", curves=None)
    return Log(store).claim("supervisor", cluster="A"), stages, writer


FAILED = RestartsExhausted("the train stage failed: Deposed: a learner is claimed under the newest supervisor")


@pytest.mark.parametrize(("cluster", "done"), [("B", ["stages ended"]), ("A", [])])
def test_replaced_supervisor_leaves_status_and_mlflow_unchanged(cluster: str, done: list[str]) -> None:
    """The old supervisor has not yet read that a new one has taken over the run. The new one owns the status, the
    MLflow run and the cluster's stages.
    """
    store, told = MemoryStore(uuid.uuid4().hex), list[str]()
    begin(store)
    supervisor, stages, writer = supervised(store, told)
    Log(store).claim("supervisor", cluster=cluster)
    assert supervisor.valid()
    _give_up(stages, writer, supervisor, FAILED)
    assert (told, writer.failure) == (done, "")


@pytest.mark.parametrize("away", [False, True])
def test_supervisor_records_why_it_failed(monkeypatch: pytest.MonkeyPatch, *, away: bool) -> None:
    """The supervisor records the reason even if the run's log is unreadable."""
    store, told = MemoryStore(uuid.uuid4().hex), list[str]()
    begin(store)
    supervisor, stages, writer = supervised(store, told)

    def get(self: MemoryStore, path: str) -> bytes:
        raise Unreachable("object storage did not answer")

    if away:
        monkeypatch.setattr(MemoryStore, "get", get)
    _give_up(stages, writer, supervisor, FAILED)
    assert told == ["stages ended", "failed", "FAILED"]
    assert writer.failure == f"RestartsExhausted: {FAILED}"


@pytest.mark.parametrize("failure", [None, Unreachable("object storage did not answer"), StoreFailed("read-only")])
def test_run_end_prunes_versions_kept_for_evaluation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failure: RollflowError | None
) -> None:
    """The supervisor prunes these versions; a store that refuses the pruning does not stop the end of the run."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    monkeypatch.setattr(post_training, "summarize", lambda *_: {"summary": "of it"})
    monkeypatch.setattr(post_training, "build_outcome", lambda *_: None)
    monkeypatch.setattr(post_training, "block_rows", lambda *_: [])
    monkeypatch.setattr(post_training, "sandbox_rows", lambda *_: [])
    store, told = MemoryStore(uuid.uuid4().hex), list[str]()
    begin(store, keep_last=1, keep_every=100)
    train(store, 5)
    supervisor, stages, writer = supervised(store, told)
    tracking = SimpleNamespace(tracking=SimpleNamespace(uri=None), versions=5)
    writer.context = SimpleNamespace(policies=PolicyStore(supervisor.log), config=tracking, key="test-1", store=store)
    left = len(supervisor.log.state.releasable)

    def delete(self: MemoryStore, path: str) -> None:
        assert failure is not None
        raise failure

    if failure:
        monkeypatch.setattr(MemoryStore, "delete", delete)
    writer.sandboxes = writer.environments = SimpleNamespace(totals=dict)
    nothing = dict.fromkeys(("plot", "progress", "anchor", "sandboxes", "environments"), lambda *_: None)
    page: Any = SimpleNamespace(close=lambda: None, **nothing)
    assert _finish(stages, writer, supervisor, AuditReport(), page) == {"summary": "of it"}
    assert told == ["FINISHED", "done"]
    assert (left, supervisor.log.state.releasable) == (4, [])
