"""Tests the simulation of rewards: program times are drawn from the published distribution, and a program that is
killed wrongly is counted.
"""

from __future__ import annotations

import statistics

import pytest

from benchmarks import reward_schedule
from benchmarks.reward_schedule import SECONDS, draw_reference_seconds, run_programs
from rollflow.tasks.scorers.code.config import AdaptiveDeadline


def test_simulated_program_times_match_the_published_times() -> None:
    drawn = sorted(draw_reference_seconds(row) for row in range(20_000))
    assert SECONDS[0][1] <= drawn[0]
    assert drawn[-1] <= SECONDS[-1][1]
    assert statistics.median(drawn) == pytest.approx(0.031, abs=0.001)
    assert drawn[19_000] == pytest.approx(0.124, rel=0.2)
    assert drawn[19_800] == pytest.approx(1.451, rel=0.3)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the simulation small: two steps per pass, with four prompts per step."""
    for name, value in {"STEPS": 2, "PROMPTS": 4, "SIZE": 4, "CAP": 64, "MEDIAN": 8}.items():
        monkeypatch.setattr(reward_schedule, name, value)


@pytest.mark.usefixtures("small")
def test_simulated_fixed_deadline_kills_no_program_early() -> None:
    _, rewards = run_programs(None, hanging=0.5)
    assert rewards.sandboxes.counts["correct"] > 0
    assert rewards.sandboxes.counts["false kills"] == 0
    assert (rewards.anchors.kills, rewards.anchors.rows) == (0, {})


@pytest.mark.usefixtures("small")
def test_simulation_counts_wrongly_killed_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A correct program takes 1.4 s times a random factor, so some programs take more than 1.5 times the program's
    reference time (anchor).
    """
    monkeypatch.setattr(reward_schedule, "draw_reference_seconds", lambda row: 1.4)
    _, rewards = run_programs(AdaptiveDeadline(recheck=1.0), hanging=0.0, spread=1.0)
    counts = rewards.sandboxes.counts
    assert 0 < counts["false kills"] == rewards.anchors.kills
    assert rewards.anchors.false_kills == rewards.anchors.rechecked > 0
