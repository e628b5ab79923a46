"""Tests SIGKILL of ranks and of their learner in a run: the run recovers by itself, with bit-identical results."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from benchmarks.chaos import Victim
from benchmarks.victims import find, kill_everything
from rollflow.flows.commands.cli import main
from rollflow.storage.objects import open_store
from rollflow.storage.run_records.recoveries import RecoveryLog
from tests.faults.test_kills import SYNCHRONOUS, sampled
from tests.support.waiting import HANG_SECONDS, RUN_SECONDS, until

pytestmark = [pytest.mark.slow, pytest.mark.soak]

RANKS, RANK_SECONDS = 3, 60.0
# The pauses before restarts double with each death, and would add up to an hour. A short window resets the pauses after
# a time without deaths.
RECIPE = (
    SYNCHRONOUS
    + f"""window_seconds = 20.0

[store]
shard_bytes = 16384

[train]
ranks = {RANKS}
rank_seconds = {RANK_SECONDS}
"""
)
WHOLE, PARTS = Counter({"rank": 20, "learner": 5}), Counter({"rank": 8, "learner": 2})
KINDS = {"whole": ("", WHOLE), "sharded": ("sharded = true", PARTS), "DeepSpeed": ('kind = "deepspeed"', PARTS)}
STOPPED = f"did not reach the other ranks within {RANK_SECONDS:g} s"


@pytest.mark.parametrize(("keys", "kills"), KINDS.values(), ids=KINDS)
def test_run_with_killed_learner_ranks_is_bit_identical(tmp_path: Path, keys: str, kills: Counter[str]) -> None:
    """With sharding, each rank stores files of every version, so some ranks are killed during a write."""
    versions = 8 * kills.total()  # about four versions pass from one kill to the next
    recipe = RECIPE.replace("versions = 100", f"versions = {versions}") + keys
    draw, killed = random.Random(), Victim(tmp_path / "killed", recipe)
    try:
        killed.wait_version(1, RUN_SECONDS)
        for role in draw.sample([*kills], k=kills.total(), counts=[*kills.values()]):
            time.sleep(draw.uniform(0.0, 0.5))
            strike(killed, role, draw)
        stop(killed, draw)
        assert killed.finish([], RUN_SECONDS).right, killed.tail()
    finally:
        kill_everything(killed.home)
    quiet = Victim(tmp_path / "quiet", recipe)
    assert quiet.finish([], RUN_SECONDS).right, quiet.tail()
    runs = [tmp_path / name / "store/runs/chaos" for name in ("killed", "quiet")]
    assert causes(runs[0]) == kills + Counter({"stopped": 1})
    assert sampled(runs[0], versions) == sampled(runs[1], versions)
    assert main(["replay", str(runs[0]), "--all"]) == 0


def strike(victim: Victim, role: str, draw: random.Random) -> None:
    """Kill one process of a role, and check that all existing ranks end, too."""
    ranks = find(victim.home, "rank")
    kill = victim.strike(role, draw)
    print(f"at version {victim.newest}: {kill}")
    assert kill.recorded
    assert psutil.wait_procs(ranks, HANG_SECONDS)[1] == []


def stop(victim: Victim, draw: random.Random) -> None:
    """Stop a rank with SIGSTOP, and wait until the run has recovered."""
    ranks = until(lambda: len(found := find(victim.home, "rank")) == RANKS - 1 and found)
    began = time.time()
    draw.choice(ranks).suspend()
    [found] = until(lambda: [one for one in victim.recoveries.read() if STOPPED in one.reason])
    print(f"stopped: seen after {found.noticed_at - began:.1f} s, {found.sentence()}")
    assert psutil.wait_procs(ranks, HANG_SECONDS)[1] == []


def causes(run: Path) -> Counter[str]:
    """Count the causes (rank, learner or stopped) of the learner's recoveries."""

    def cause(reason: str) -> str:
        if STOPPED in reason:
            return "stopped"
        return "rank" if re.match(r"rank [12] of 3 was killed by SIGKILL while", reason) else "learner"

    return Counter(cause(one.reason) for one in RecoveryLog(open_store(str(run))).read())
