"""Tests that a run reports from the data in its storage if it learns nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollflow.flows.commands.run import _suggest_next_step
from rollflow.flows.keepalive.run_watch import RunWatch
from rollflow.flows.tracking.status_writer import StatusWriter
from rollflow.flows.views.console import print_summary
from rollflow.flows.views.no_signal import count_newest_without, count_without_signal, describe_no_signal
from rollflow.flows.views.status import read_status
from rollflow.flows.views.summary import summarize
from rollflow.storage.audit.audit import audit
from rollflow.storage.errors import ConfigError
from rollflow.storage.policies import PolicyVersion
from rollflow.tasks.actors.statuses import LearnerStatus, RolloutStatus
from rollflow.tasks.run.context import RunContext
from tests.flows.test_status_writer import NoTracker, Seen
from tests.support import small_run
from tests.support.small_run import prepare_small, train_small


def version(number: int, share: float | None) -> PolicyVersion:
    metrics = {} if share is None else {"rows_with_signal": share}
    return PolicyVersion(number, number, 0, 0.0, number or None, (), (), (), metrics, "")


@pytest.mark.parametrize(
    ("shares", "newest", "count"),
    [
        ([], 0, 0),
        ([None], 0, 0),
        ([None, 0.0, 0.0], 2, 2),
        ([None, 0.0, 0.5], 0, 1),
        ([None, 0.0, 0.5, 0.0, 0.0], 2, 3),
        ([None, None, 0.0], 1, 1),  # None: an older version that did not record this share
        ([0.0, 0.0], 1, 1),  # version 0 is not counted, because it was not trained
    ],
)
def test_versions_whose_advantages_are_all_zero_are_counted(
    shares: list[float | None], newest: int, count: int
) -> None:
    versions = [version(number, share) for number, share in enumerate(shares)]
    assert (count_newest_without(versions), count_without_signal(versions)) == (newest, count)


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunContext:
    """Make a run of four versions in which all rewards are 0."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    given = small_run.trajectory
    monkeypatch.setattr(small_run, "trajectory", lambda *asked: replace(given(*asked), reward=0.0))
    context = prepare_small(tmp_path, versions=4, train={"no_signal": "stop", "no_signal_versions": 3})
    train_small(context)
    return context


def writer_of(context: RunContext) -> StatusWriter:
    tracker: Any = NoTracker()
    return StatusWriter(context, Seen(RolloutStatus(), LearnerStatus()), tracker)


@pytest.mark.long
def test_run_without_nonzero_advantages_is_reported_or_stopped(
    silent: RunContext, capsys: pytest.CaptureFixture[str]
) -> None:
    """A supervisor that takes over the run, for example after `rollflow resume`, notices the missing signal at its
    first check.
    """
    writer, words = writer_of(silent), describe_no_signal(4, 4)
    supervisor: Any = SimpleNamespace(check=lambda: None)
    stages: Any = SimpleNamespace(paused=False)
    with pytest.raises(ConfigError) as stopped:
        RunWatch(stages, writer, supervisor)._tell()
    assert str(stopped.value) == f"train.no_signal = 'stop': {words}"
    assert words.startswith("versions 1 to 4 learned nothing: all responses")
    status = read_status(silent)
    assert status is not None
    assert status.messages[-1] == words
    summary = summarize(silent, audit(silent.store), {}, RolloutStatus(), {})
    assert summary["no_signal"] == {"versions": 4, "newest": 4}
    print_summary(summary)
    assert "nothing was learned in 4 of 4 versions" in capsys.readouterr().out


@pytest.mark.long
def test_run_with_nonzero_advantages_is_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    context = prepare_small(tmp_path, versions=4)
    train_small(context)
    writer = writer_of(context)
    writer.refresh()
    assert (writer.no_signal, writer.messages) == ("", [])
    assert summarize(context, audit(context.store), {}, RolloutStatus(), {})["no_signal"] == {
        "versions": 0,
        "newest": 0,
    }


@pytest.mark.parametrize(
    ("reason", "resumable"),
    [
        (
            "ConfigError: policy.cold_start.target_accuracy = 0.9: the policy reached a held-out accuracy of only 0.10",
            False,
        ),
        ("GaveUp: the train stage failed: ConfigError: train.lora.targets = ['x']", False),
        ("GaveUp: the engine died 6 times", True),
        ("no reason was recorded", True),
    ],
)
def test_error_suggests_resume_only_if_resuming_can_help(reason: str, resumable: bool) -> None:
    said = _suggest_next_step(reason, "/a/run")
    assert said.endswith("rollflow resume /a/run") is resumable
    assert resumable or "would fail again: change what the error names (rollflow resume /a/run --set" in said
