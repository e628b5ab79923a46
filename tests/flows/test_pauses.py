"""Tests that training speeds exclude pauses, stops and outages. The expected speeds are computed by hand; each test
sets the clock of its log.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rollflow.flows.tracking.mlflow_run import VERSION
from rollflow.flows.tracking.status_writer import points_of
from rollflow.flows.views import progress_blocks
from rollflow.flows.views.pauses import paused_seconds
from rollflow.flows.views.progress import RunProgress
from rollflow.storage.log.entries import VersionPublished
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects import open_store
from rollflow.storage.records import StoredObject
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from tests.support.batches import begin, learning, scheduling, staged

TOKENS = 8.0  # response tokens of a batch: two groups of two responses of two tokens each
METRICS = {
    "response_tokens": TOKENS,
    "discarded_tokens": 0.0,
    "surplus_tokens": 0.0,
    "discarded_groups": 0.0,
    "wait_seconds": 1.0,
    "reward": 0.5,
    "staleness_mean": 0.0,
}


class Run:
    """A run on a clock that the test sets. Generating a batch takes 6 seconds, and training a version on it takes 4
    more.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        patch.setattr(time, "time", lambda: self.now)
        self.store = open_store(str(folder))
        begin(self.store)
        self.context = RunContext(str(folder), folder / "cache")

    def start_stages(self) -> None:
        """Take over both roles again: first the scheduler's, and 2 seconds later the learner's."""
        self.batches, self.scheduler = scheduling(self.store)
        self.now += 2
        self.policies, self.learner = learning(self.store)

    def train(self, versions: int) -> None:
        for _ in range(versions):
            number = self.policies.newest() + 1
            if number:
                self.now += 6
                self.batches.commit(self.scheduler, staged(number - 1, number - 1))
                self.policies.newest()
                self.now += 4
            weights = (StoredObject(f"policies/{number}", 1, "0" * 64),)
            state = (StoredObject(f"states/{number}", 1, "0" * 64),)
            batch = self.policies.log.state.waiting[number - 1].entry if number else None
            told = METRICS if number else {}
            self.policies.publish(self.learner, VersionPublished(number, batch, weights, state, metrics=told))

    def resume(self) -> None:
        Log(self.store).claim("supervisor")
        self.start_stages()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    made = Run(tmp_path, monkeypatch)
    made.start_stages()
    made.now += 500.0  # a cold start is before version 0
    made.train(3)
    return made


def test_reported_speeds_exclude_pauses_of_the_run(run: Run) -> None:
    """A version takes ten seconds; with an hour's pause and a night's stop the speed is the same."""
    run.now += 3600.0
    run.resume()
    run.train(2)
    run.now += 3.0  # the stages had worked for three seconds when the run was killed
    run.now += 40_000.0
    run.resume()
    run.train(2)
    progress = RunProgress(run.context)
    progress.advance()
    assert progress.version == 6
    assert progress.paused_seconds == pytest.approx(3600 + 2 + 40_003 + 2)
    assert progress.training_seconds == pytest.approx(60.0)
    assert progress.tokens_per_second == pytest.approx(TOKENS / 10)
    assert progress.tokens_per_second_now == pytest.approx(TOKENS / 10)
    speeds = [point.metrics["system/tokens_per_second"] for point in points_of(run.context, VERSION, range(1, 7))]
    assert speeds == pytest.approx([TOKENS / 10] * 6)
    idle = [point.metrics["system/idle"] for point in points_of(run.context, VERSION, range(1, 7))]
    assert idle == pytest.approx([0.1] * 6)


def test_status_during_a_run_includes_earlier_pauses(run: Run) -> None:
    """A view that reads only the newest versions also includes the pauses before these versions."""
    run.now += 3600.0
    run.resume()
    run.train(3)
    late = RunProgress(run.context)
    late.versions.append(run.context.policies.find(5))
    first, last = run.context.policies.find(0), run.context.policies.find(5)
    assert paused_seconds(run.context, first, last) == pytest.approx(3602)
    assert paused_seconds(run.context, run.context.policies.find(3), last) == 0.0


def test_progress_table_excludes_pauses_of_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.now += 3600.0
    run.resume()
    run.train(2)
    monkeypatch.setattr(RunContext, "config", RunConfig(groups=2))
    [row] = progress_blocks.block_rows(run.context, [(1, 4)])
    assert row["tokens/s"] == f"{TOKENS / 10:,.0f}"
    assert row["idle"] == "10%"


def test_restart_of_one_stage_does_not_count_as_a_pause(run: Run) -> None:
    """The seconds that the restart of a stage takes are counted as training time."""
    run.now += 30.0
    run.start_stages()
    run.train(1)
    progress = RunProgress(run.context)
    progress.advance()
    assert progress.paused_seconds == 0.0
    assert progress.training_seconds == pytest.approx(62.0)


def test_replaced_supervisor_does_not_count_as_a_pause(run: Run) -> None:
    """A batch that is committed between the supervisors shows that the stages were working."""
    run.now += 1.0
    Log(run.store).claim("supervisor")
    run.train(1)
    run.now += 1.0
    run.start_stages()
    run.train(1)
    progress = RunProgress(run.context)
    progress.advance()
    assert progress.paused_seconds == 0.0
