"""Tests a run whose environments hang, crash, write garbage or never start: each episode has a reason for its end, and
no process is left.

`benchmarks/environment_faults.py` measures the throughput of such a run.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.environment_faults import (
    ENDINGS,
    HEALTHY,
    FaultRun,
    FaultSetup,
    find_fate,
    mark_processes,
    play_run,
)
from benchmarks.faulty_world import FAULTS, draw_fault
from rollflow.storage.records import DiscardReason
from rollflow.tasks.environments.foreign.play import find_seed
from tests.support.pipeline import prompt_at

VERSIONS = 4
SHARES = dict.fromkeys(FAULTS, 0.15)
SETUP = FaultSetup(
    processes=8, turns=2, step=0.01, generation=0.01, deadline=2.0, groups=4, size=2, shares=SHARES, by_seed=True,
    max_failures=2,
)  # fmt: skip


def expect_fate(prompt: int) -> str:
    """Return the fault that the environment of a prompt has."""
    return draw_fault(random.Random(find_seed(prompt_at(prompt))), SHARES, SETUP.turns)[0]


def test_each_episode_ends_as_the_fault_of_its_prompt_says(tmp_path: Path) -> None:
    found = play_run(SETUP, VERSIONS, tmp_path, is_faulty=True)
    fates = Counter(find_fate(one) for _, one in found.endings)
    assert [find_fate(one) for _, one in found.endings] == [expect_fate(prompt) for prompt, _ in found.endings]
    assert fates.keys() == ENDINGS.keys()
    assert fates.total() == VERSIONS * SETUP.groups * SETUP.size
    assert all(one.reward == (find_fate(one) == HEALTHY) for _, one in found.endings)
    assert found.discards.keys() == {DiscardReason.UNJUDGED}
    assert (found.violations, found.left) == (0, [])
    check_rotation(found)


def check_rotation(found: FaultRun) -> None:
    """Check that only the environment that never starts was left out, after `max_failures` failures."""
    assert found.rotation.out.keys() == {"broken"}
    assert "2 episodes in a row failed" in found.rotation.out["broken"]
    assert "exited with code 7 during open" in found.rotation.out["broken"]
    assert found.rotation.kinds["world"].health.failures == 0


def test_leftover_process_is_found() -> None:
    with mark_processes() as list_left:
        left = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        assert list_left() == [left.pid]
        left.communicate(b"\n")
        assert list_left() == []
    assert "ROLLFLOW_FAULTS" not in os.environ


def test_throughput_bound_includes_the_time_of_each_fault() -> None:
    """A healthy episode takes 2.4 s, one that crashes 1.15 s on average, one that hangs 3.15 s."""
    setup = FaultSetup()
    assert setup.find_bound({HEALTHY: 10}) == pytest.approx(1.0)
    assert setup.find_bound({HEALTHY: 1, "exit": 1}) == pytest.approx(4.8 / (2.4 + 1.15))
    seconds = 65 * 2.4 + 20 * 3.15 + 15 * 1.15
    assert setup.find_bound({HEALTHY: 65, "hang": 20, "garbage": 15}) == pytest.approx(240 / seconds)
