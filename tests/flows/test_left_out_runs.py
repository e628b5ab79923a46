"""Tests a small run in which unjudged responses are left out of training: its training, audit, replay, and output for
users.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rollflow.flows.commands.cli import main
from rollflow.flows.commands.log import describe_entry
from rollflow.flows.config import parse_config
from rollflow.flows.tracking.tracking import ROLLOUT
from rollflow.flows.views.progress import system_figures
from rollflow.flows.views.progress_blocks import block_rows
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import ConfigError
from rollflow.storage.log.entries import BatchCommitted, Entry
from rollflow.storage.records import (
    Discard,
    DiscardReason,
    GroupKey,
    Outcome,
    StoredObject,
    Trajectory,
    TrajectoryGroup,
    UnjudgedResponse,
)
from rollflow.storage.trajectories import StagedBatch
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.rejudge import Rejudging
from tests.support import small_run
from tests.support.small_run import prepare_small, train_small

WHY = "the judge [at judge.example] is away"
JUDGED_BY = {"kind": "reasoning-gym", "unjudged": "leave_out"}


def leave_out(one: Trajectory) -> Trajectory:
    return replace(one, left_out=True, reward=math.nan, outcome=Outcome.UNJUDGED, reason=WHY)


def change_group(group: TrajectoryGroup) -> TrajectoryGroup:
    """Leave out the second response of each group with an odd prompt."""
    rows = [replace(one, outcome=Outcome.CORRECT if one.reward else Outcome.WRONG) for one in group.trajectories]
    if group.key.prompt % 2:
        rows[1] = leave_out(rows[1])
    return replace(group, trajectories=tuple(rows))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunContext]:
    """Train three versions; batch 2 discards an unjudged group with its reason."""
    home, made = tmp_path_factory.mktemp("home"), small_run.batch

    def batch(context: RunContext, number: int, **given: Any) -> StagedBatch:
        staged = made(context, number, **given)
        lost = tuple(Discard(one.key, DiscardReason.UNJUDGED, 0, 21) for one in staged.discards)
        told = tuple(UnjudgedResponse(*one.key, 2, WHY) for one in lost)
        return replace(staged, groups=tuple(map(change_group, staged.groups)), discards=lost, unjudged=told)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLFLOW_HOME", str(home))
        patch.setattr(small_run, "batch", batch)
        context = prepare_small(home, versions=3, reward=JUDGED_BY)
        train_small(context)
        yield context


def read_batch(run: RunContext, version: int) -> TrajectoryBatch:
    entry = run.policies.find(version).batch_entry
    assert entry is not None
    return TrajectoryBatch.from_bytes(run.batches.read(run.batches.read_commit(entry).file))


def test_version_metrics_count_left_out_responses_and_tokens(run: RunContext) -> None:
    for version in (1, 2, 3):
        metrics, batch = run.policies.find(version).metrics, read_batch(run, version)
        lost = [one for group in batch.groups() for one in group.trajectories if one.left_out]
        kept = [one for group in batch.groups() for one in group.trajectories if not one.left_out]
        assert len(lost) == 1
        assert metrics["left_out_responses"] == 1.0
        assert metrics["left_out_tokens"] == sum(one.response_tokens for one in lost)
        assert metrics["reward"] == pytest.approx(sum(one.reward for one in kept) / len(kept))
        assert metrics["response_length"] == pytest.approx(sum(one.response_tokens for one in kept) / len(kept))
        assert any("left_out_responses".startswith(name) for name in ROLLOUT)


def test_deep_audit_accepts_a_run_with_left_out_responses(run: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--deep", "small"]) == 0
    assert "3 unjudged responses are stored and left out of their groups" in capsys.readouterr().out


def test_replay_of_a_run_with_left_out_responses_succeeds(run: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "small", "--all"]) == 0
    assert "version 3" in capsys.readouterr().out


def test_inspect_shows_why_a_response_was_left_out(run: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "small", "1.0"]) == 0
    assert "left out" in capsys.readouterr().out
    assert main(["inspect", "small", "1.0.1"]) == 0
    assert f"none, left out of its group ({WHY})" in capsys.readouterr().out
    assert main(["inspect", "small", "1.0.1", "--json"]) == 0
    [value] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["trajectories"]
    assert (value["left_out"], value["reward"], value["reason"]) == (True, None, WHY)


def test_inspect_and_log_show_why_a_group_was_not_judged(run: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "small", "4.0"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "discarded as unjudged" in text
    assert WHY in text
    assert main(["inspect", "small", "3"]) == 0
    assert f"2 responses: {WHY}" in " ".join(capsys.readouterr().out.split())
    assert main(["log", "small"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "1 unjudged responses left out" in text
    assert GroupKey(4, 1) in read_batch(run, 3).keys


def test_log_shows_a_reason_of_several_lines_as_one_line() -> None:
    told = UnjudgedResponse(1, 0, 2, "away\n\x1b[31m2026-01-01  7  learner\tversion 9 published")
    body = BatchCommitted(0, StoredObject("", 0, ""), 0, (), (), unjudged=(told,))
    text = describe_entry(Entry(1, "", "", "scheduler", 0, 0, 1, 0.0, body))
    assert text.endswith("; why unjudged: away [31m2026-01-01 7 learner version 9 published")


def test_progress_counts_left_out_tokens_as_waste(run: RunContext) -> None:
    before, version = run.policies.find(0), run.policies.find(1)
    lost = version.metrics["left_out_tokens"]
    expected = (lost + version.metrics["discarded_tokens"]) / (
        version.metrics["response_tokens"] + version.metrics["discarded_tokens"]
    )
    assert system_figures(before, version)["waste"] == pytest.approx(expected)
    [row] = block_rows(run, [(1, 3)])
    assert row["unjudged, left out"] == "3"


@pytest.mark.parametrize("size", [2, 3])
def test_small_group_cannot_leave_a_response_out(size: int) -> None:
    tree = {
        "policy": {"path": "p"},
        "group_size": size,
        "prompts": [{"kind": "sorting"}, {"kind": "sorting", "reward": "far"}],
        "reward": {"kind": "exact"},
        "rewards": {"far": {"kind": "exact", "unjudged": "leave_out"}},
    }
    if size == 3:
        assert parse_config(tree).scorers["far"].leaves_out
        return
    with pytest.raises(ConfigError, match=r"^rewards\.far\.unjudged = 'leave_out': .*set group_size above 2"):
        parse_config(tree)


def test_rejudge_skips_responses_that_are_left_out(run: RunContext) -> None:
    verdicts = Rejudging(run, run.config).read_verdicts(1)
    assert len(verdicts) == len(read_batch(run, 1)) - 1
    assert not any(one.trajectory.left_out for one in verdicts)
