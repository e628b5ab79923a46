"""Tests that the status is built from the typed values that actors report, and never from their texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from rollflow.flows.tracking import status_writer
from rollflow.flows.tracking.status_writer import StatusWriter
from rollflow.flows.tracking.tracking import shown_name
from rollflow.flows.views.inspect_values import run_value
from rollflow.flows.views.progress_blocks import environment_rows, sandbox_rows
from rollflow.flows.views.status import STATUS, RunStatus, StageStatus, read_status
from rollflow.storage.objects import open_store
from rollflow.storage.policies import PolicyVersion
from rollflow.storage.run_records.environment_figures import EnvironmentUse, read_environment_uses
from rollflow.storage.run_records.sandbox_figures import SandboxFigures, SandboxUse, read_sandbox_uses
from rollflow.storage.run_records.usage import CpuUsage
from rollflow.tasks.actors.statuses import LearnerPhase, LearnerStatus, RewardStatus, RolloutStatus
from rollflow.tasks.run.cluster_config import ClusterConfig, RewardActorsConfig
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from tests.support.described import describe


class Seen:
    """Stages with the last status that each actor has reported."""

    def __init__(self, rollout: RolloutStatus, learner: LearnerStatus, reward: RewardStatus | None = None) -> None:
        self.rollout, self.learner, self.usage = rollout, learner, CpuUsage()
        self.reward = reward or RewardStatus()

    def statuses(self) -> dict[str, StageStatus]:
        return {"train": StageStatus("Running", self.learner.line, self.learner.idle)}


class NoTracker:
    """A tracker that ignores all calls."""

    def __getattr__(self, name: str) -> Any:
        return lambda *given: None


def shown(folder: Path, rollout: RolloutStatus, learner: LearnerStatus) -> RunStatus:
    """Return the stored status of a run without a version, after the supervisor has written it for the first time."""
    describe(open_store(str(folder)), "new", RunConfig(groups=4))
    context = RunContext(str(folder), folder / "cache")
    tracker: Any = NoTracker()
    StatusWriter(context, Seen(rollout, learner), tracker).refresh()
    status = read_status(context)
    assert status is not None
    return status


@pytest.mark.parametrize(
    ("learner", "phase"),
    [
        (LearnerStatus(), "starting"),
        (LearnerStatus(phase=LearnerPhase.COLD_START, note="step 20"), "cold start"),
        (LearnerStatus(phase=LearnerPhase.RESTORING, note="after a cold start: replaying version 1"), "starting"),
    ],
)
def test_status_phase_follows_the_phase_of_the_learner(tmp_path: Path, learner: LearnerStatus, phase: str) -> None:
    status = shown(tmp_path, RolloutStatus(), learner)
    assert status.phase == phase
    assert status.stages["train"].note == learner.note


def test_status_is_written_at_most_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress in the status shows a command that follows the run whether the supervisor is busy or hangs."""
    describe(open_store(str(tmp_path)), "new", RunConfig())
    context, tracker = RunContext(str(tmp_path), tmp_path / "cache"), cast(Any, NoTracker())
    writer = StatusWriter(context, Seen(RolloutStatus(), LearnerStatus()), tracker)
    put, written = context.store.put, list[str]()
    monkeypatch.setattr(type(context.store), "put", lambda _, path, data: written.append(path) or put(path, data))
    now = [1000.0]
    monkeypatch.setattr(status_writer.time, "monotonic", lambda: now[0])
    for _ in range(5):
        now[0] += 0.5
        writer.note_progress("evaluating")
    assert written.count(STATUS) == 2
    status = read_status(context)
    assert status is not None
    assert status.phase == "evaluating"


def test_status_counts_ready_and_waiting_prompt_groups(tmp_path: Path) -> None:
    status = shown(tmp_path, RolloutStatus(buffered=3, waiting=2, running=5), LearnerStatus())
    assert (status.buffer_groups, status.in_flight_groups) == (3 + 2 * 4, 5)


DAMAGED = ["", "[]", "null", '{"run_id": "new", "staleness": 3}', '{"run_id": "new", "odd": "\xff"}']


@pytest.mark.parametrize("damaged", DAMAGED)
def test_damaged_status_file_counts_as_missing(tmp_path: Path, damaged: str) -> None:
    describe(open_store(str(tmp_path)), "new")
    context = RunContext(str(tmp_path), tmp_path / "cache")
    context.store.put(STATUS, damaged.encode("latin-1"))
    assert read_status(context) is None


def test_counts_of_the_reward_stage_become_version_metrics(tmp_path: Path) -> None:
    describe(open_store(str(tmp_path)), "new", RunConfig())
    context, tracker = RunContext(str(tmp_path), tmp_path / "cache"), cast(Any, NoTracker())
    version = PolicyVersion(1, 1, 0, 0.0, 1, (), (), (), {"reward": 0.5}, "")
    seen = Seen(RolloutStatus(), LearnerStatus(), RewardStatus(kills=40, rechecked=2, false_kills=1))
    metrics = StatusWriter(context, seen, tracker)._metrics_of(version)
    assert {name: value for name, value in metrics.items() if "/" in name} == {
        "reward/kills": 40.0,
        "reward/rechecked": 2.0,
        "reward/false_kills": 1.0,
    }
    twice = RewardStatus(second_verdicts={"reward": 30, "rewards.b": 10}, flips={"reward": 0, "rewards.b": 2})
    metrics = StatusWriter(context, Seen(RolloutStatus(), LearnerStatus(), twice), tracker)._metrics_of(version)
    shown = {name: value for name, value in metrics.items() if "/" in name}
    assert shown == {"reward/second_verdicts": 40.0, "reward/flips": 2.0}
    assert shown_name("reward/kills") == "reward/kills"
    assert shown_name("reward") == "rollout/reward"
    without = StatusWriter(context, Seen(RolloutStatus(), LearnerStatus()), tracker)._metrics_of(version)
    assert not any("/" in name for name in without)


def test_sandbox_counts_are_in_status_run_records_and_mlflow(tmp_path: Path) -> None:
    """The supervisor is restarted, and the reward actor dies and is restarted."""
    describe(open_store(str(tmp_path)), "new", RunConfig())
    context, tracker = RunContext(str(tmp_path), tmp_path / "cache"), cast(Any, NoTracker())

    def show(process: str, figures: SandboxFigures) -> StatusWriter:
        seen = RewardStatus(sandboxes=[SandboxUse(process, "rock", figures)])
        writer = StatusWriter(context, Seen(RolloutStatus(), LearnerStatus(), seen), tracker)
        writer.refresh("training")
        return writer

    show("first", SandboxFigures(3, ends={"exited": 2}, in_use=1))
    show("first", SandboxFigures(4, ends={"exited": 3}, in_use=1))
    writer = show("second", SandboxFigures(1, ends={"timeout": 1}, in_use=1))
    status = read_status(context)
    assert status is not None
    assert status.sandboxes["rock"]["programs"] == 4.0
    assert status.sandboxes["rock"]["in_use"] == 1.0, "the process that is gone uses no sandbox"
    assert read_sandbox_uses(context.store).totals()["rock"].started == 5
    metrics = writer._metrics_of(PolicyVersion(1, 1, 0, 0.0, 1, (), (), (), {"reward": 0.5}, ""))
    assert metrics["sandboxes/rock/killed_timeout"] == 1.0
    assert shown_name("sandboxes/rock/started") == "sandboxes/rock/started"
    [row] = sandbox_rows(writer.sandboxes.totals())
    assert (row["kind"], row["programs"], row["killed at the deadline"], row["in use"]) == ("rock", 4, 1, 1)


def test_environment_counts_are_in_status_records_and_mlflow(tmp_path: Path) -> None:
    """The supervisor and the rollout actor are restarted."""
    describe(open_store(str(tmp_path)), "new", RunConfig())
    context, tracker = RunContext(str(tmp_path), tmp_path / "cache"), cast(Any, NoTracker())

    def show(process: str, hangs: float) -> StatusWriter:
        rollout = RolloutStatus(environments=[EnvironmentUse(process, "trl", {"resets": 9.0, "hangs": hangs})])
        writer = StatusWriter(context, Seen(rollout, LearnerStatus()), tracker)
        writer.refresh("training")
        return writer

    show("first", 1.0)
    show("first", 2.0)
    writer = show("second", 1.0)
    status = read_status(context)
    assert status is not None
    assert status.environments == {"trl": {"resets": 18.0, "hangs": 3.0}}
    assert read_environment_uses(context.store).totals() == status.environments
    metrics = writer._metrics_of(PolicyVersion(1, 1, 0, 0.0, 1, (), (), (), {"reward": 0.5}, ""))
    assert metrics["environments/trl/hangs"] == 3.0
    assert shown_name("environments/trl/hangs") == "environments/trl/hangs"
    assert environment_rows(writer.environments.totals()) == [{"kind": "trl", "resets": 18, "hangs": 3}]
    assert run_value(context)["environments"] == status.environments


def test_number_of_reward_actors_is_a_metric_if_it_can_vary(tmp_path: Path) -> None:
    actors = ClusterConfig(reward_actors=RewardActorsConfig(max=4))
    describe(open_store(str(tmp_path)), "new", RunConfig(cluster=actors))
    context, tracker = RunContext(str(tmp_path), tmp_path / "cache"), cast(Any, NoTracker())
    version = PolicyVersion(1, 1, 0, 0.0, 1, (), (), (), {"reward": 0.5}, "")
    seen = Seen(RolloutStatus(), LearnerStatus(), RewardStatus(actors=3))
    metrics = StatusWriter(context, seen, tracker)._metrics_of(version)
    assert {name: value for name, value in metrics.items() if "/" in name} == {"reward/actors": 3.0}
    assert shown_name("reward/actors") == "reward/actors"
