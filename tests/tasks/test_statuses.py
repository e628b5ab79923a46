"""Tests the statuses of actors: each field either shows progress, or is a clock, whose changes must not hide that an
actor hangs.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, get_type_hints

import pytest

from rollflow.storage.run_records.environment_figures import EnvironmentUse
from rollflow.storage.run_records.sandbox_figures import SandboxFigures, SandboxUse
from rollflow.storage.run_records.usage import CpuCost
from rollflow.tasks.actors.statuses import ActorStatus, LearnerPhase, LearnerStatus, RewardStatus, RolloutStatus
from rollflow.tasks.engines.base import DraftCounts

STATUSES: list[ActorStatus] = [RolloutStatus(), LearnerStatus(), RewardStatus()]
OF_EACH = pytest.mark.parametrize("status", STATUSES, ids=lambda status: type(status).__name__)
EXAMPLES: dict[type, Any] = {int: 7, bool: False, float: 0.7, str: "other", LearnerPhase: LearnerPhase.DONE}
EXAMPLES[DraftCounts] = DraftCounts(4, 12, 6)


def another(status: ActorStatus, name: str) -> Any:
    """Return a value that differs from the field's default."""
    hint = get_type_hints(type(status))[name]
    if hint in EXAMPLES:
        return EXAMPLES[hint]
    if name == "costs":
        return [CpuCost("learner", "a:1:1", 1.0)]
    if name == "sandboxes":
        return [SandboxUse("a:1:1", "rock", SandboxFigures(1))]
    if name == "environments":
        return [EnvironmentUse("a:1:1", "trl", {"steps": 1.0})]
    return {3: "its core died"} if hint == Mapping[int, str] else {"stale": 2}


@OF_EACH
def test_each_status_field_is_either_progress_or_a_clock(status: ActorStatus) -> None:
    names = {one.name for one in fields(status)}
    assert status.progress.keys() | status.TICKING == names, "a field is neither progress nor in TICKING"
    assert not status.progress.keys() & status.TICKING


@OF_EACH
def test_status_fields_except_clocks_show_progress(status: ActorStatus) -> None:
    for one in fields(status):
        moved = replace(status, **{one.name: another(status, one.name)})
        assert moved != status, one.name
        assert (moved.progress == status.progress) == (one.name in status.TICKING), one.name


@OF_EACH
def test_status_can_be_pickled(status: ActorStatus) -> None:
    assert pickle.loads(pickle.dumps(status)) == status  # noqa: S301 - our own


def test_status_reports_the_amount_of_finished_work() -> None:
    assert RolloutStatus(trajectories=3).made == LearnerStatus(trained=3).made == RewardStatus(scored=3).made == 3.0


def test_status_line_omits_small_shares() -> None:
    assert RolloutStatus(waits_for="object storage", version=3).line == "waits for object storage"
    quiet = RolloutStatus(version=3, trajectories=40, held=0.02, dropped=0.02, discards={"stale": 0})
    assert quiet.line == "version 3, 40 trajectories"
    busy = replace(quiet, held=0.5, dropped=0.25, discards={"stale": 2, "failed": 1})
    assert busy.line == (
        "version 3, 40 trajectories, 3 discarded, drops 25% of its tokens as too slow, held back by alpha 50%"
    )
    drafted = replace(quiet, drafts=DraftCounts(verified=4, drafted=12, accepted=6))
    assert drafted.line == "version 3, 40 trajectories, 2.5 tokens a step with a draft"
    assert RewardStatus(scored=9).line == "9 scored"
    assert RewardStatus(scored=9, timeouts=1).line == "9 scored, 1 timed out"
    assert replace(quiet, unscored=9, backlogged=0.5).line == "version 3, 40 trajectories, held back by rewards 50%"
    assert RewardStatus(scored=9, kills=4).line == "9 scored, 4 test cases killed early"
    checked = RewardStatus(scored=9, timeouts=1, kills=40, rechecked=2, false_kills=1)
    assert checked.line == "9 scored, 1 timed out, 40 test cases killed early, 1 of 2 rechecked wrongly"
    twice = replace(
        checked, kills=0, second_verdicts={"reward": 30, "rewards.b": 10}, flips={"reward": 0, "rewards.b": 2}
    )
    assert twice.line == "9 scored, 1 timed out, 2 of 40 flipped when judged again"
    assert LearnerStatus(note="replaying version 2 of 5").line == "replaying version 2 of 5"


def test_status_line_names_the_number_of_reward_actors() -> None:
    assert RewardStatus(scored=9, actors=3).line == "9 scored by 3 reward actors"
    assert RewardStatus(scored=9, timeouts=1, actors=2).line == "9 scored by 2 reward actors, 1 timed out"
