"""Tests the simulated runs of `benchmarks.scheduling_limits`: their idle times, and the order of prompts whose length
is known.
"""

from __future__ import annotations

import pytest

from benchmarks.scheduling_limits import KnownLengthsRun, LongestFirst, WatchedRun, idle
from benchmarks.workloads import changed, recipe, rollout_only
from rollflow.tasks.engines.lengths import draw_prompt_number
from rollflow.tasks.simulation.world import simulate


def test_longest_first_issues_each_prompt_of_a_batch_once() -> None:
    mixture = LongestFirst((1.0,))
    mixture.groups = 8
    for batch in range(3):
        issued = [mixture.next() for _ in range(8)]
        assert sorted(issued) == list(range(8 * batch, 8 * batch + 8))
        numbers = [draw_prompt_number((prompt,)) for prompt in issued]
        assert numbers == sorted(numbers, reverse=True)


@pytest.mark.parametrize("world", [WatchedRun, KnownLengthsRun])
def test_idle_times_by_cause_add_up_to_the_total_idle_time(world: type[WatchedRun]) -> None:
    hardware = changed(rollout_only(2, 8, cap=4000), learner={"seconds_per_version": 30.0}, update={"seconds": 2.0})
    figures = simulate(recipe(2, 16, 2, cap=4000), hardware, versions=16, world_type=world).figures
    rows = {row.metric: row.value for row in idle("", figures)}
    slots = [value for name, value in rows.items() if name.startswith("slots")]
    assert len(slots) == 3
    assert sum(slots) / 100 == pytest.approx(figures.idle.slots, abs=0.03)
    learner = [value for name, value in rows.items() if name.startswith("learner")]
    assert sum(learner) == pytest.approx(figures.idle.learner * figures.step_seconds)
    assert min(learner) >= -1e-9
