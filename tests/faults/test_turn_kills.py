"""Tests SIGKILL during episodes of several turns: no finished turn is lost, and no action is repeated."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.chaos import EVERYTHING, Victim
from benchmarks.victims import kill_everything
from rollflow.storage.objects import open_store
from tests.faults.test_kills import KILLED, SYNCHRONOUS, sampled
from tests.support.counting_turns import TURNS
from tests.support.waiting import RUN_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.soak]

ROOT = Path(__file__).parents[2]
# No reward worker is killed, because these episodes need none, and a worker is restarted only if it is needed.
VICTIMS = [role for role in KILLED if role != "reward worker"]
VERSIONS = 40
EPISODES = 8 * 4  # number of episodes of each version
RECIPE = (
    SYNCHRONOUS.replace("versions = 100", f"versions = {VERSIONS}").replace("max_new_tokens = 6", "max_new_tokens = 24")
    + """
[environment]
kind = "import"
path = "tests.support.counting_turns:CountingTurns"
options = { path = "FILE" }

[rollout]
durable_turns = "before-action"
"""
)


def finish_run(folder: Path, kills: int) -> Counter[str]:
    """Execute the recipe with `kills` kills, and return how often each action was done in training."""
    folder.mkdir()
    actions = folder / "actions"
    actions.touch()
    draw, victim = random.Random(), Victim(folder / "home", RECIPE.replace("FILE", str(actions)))
    try:
        if kills:
            victim.wait_version(1, RUN_SECONDS)
        for role in draw.choices(VICTIMS, k=kills):
            time.sleep(draw.uniform(0.0, 0.5))
            kill = victim.strike_everything() if role == EVERYTHING else victim.strike(role, draw, record=False)
            print(f"at version {victim.newest}: {kill}")
        outcome = victim.finish([], RUN_SECONDS)
    finally:
        kill_everything(victim.home)
    assert outcome.right, outcome
    lines = actions.read_text().splitlines()
    return Counter(line for line in lines if not line.startswith(" "))  # an episode of an evaluation has no id


def test_episode_resumed_after_a_kill_repeats_no_action(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    quiet, killed = finish_run(tmp_path / "quiet", 0), finish_run(tmp_path / "killed", 10)
    runs = "home/store/runs/chaos"
    assert sampled(tmp_path / "killed" / runs, VERSIONS) == sampled(tmp_path / "quiet" / runs, VERSIONS)
    assert killed == quiet
    assert set(killed.values()) == {1}
    assert len(killed) == VERSIONS * EPISODES * TURNS
    assert not list(open_store(str(tmp_path / "killed" / runs)).list("turns"))
