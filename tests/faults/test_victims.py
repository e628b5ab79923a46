"""Tests how `benchmarks.chaos` recognises kills and the recoveries of a role."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from benchmarks import chaos, victims
from benchmarks.chaos import Victim
from benchmarks.chaos_table import Kill, Outcome, table_of
from benchmarks.victims import RECORDED_AS, ROLES, is_record_of, kill, kill_everything, mine
from rollflow.flows.steps import build_tags
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.run_records.recoveries import RecoveryLog
from rollflow.tasks.run.config import RunConfig
from tests.support.log_runs import committed
from tests.support.small_run import GROUPS, SIZE, prepare_small, train_small
from tests.support.waiting import until


def test_kill_counts_only_after_the_process_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        process = psutil.Process(child.pid)
        assert kill(process)  # the process is a zombie until it is waited for, and counts as gone
        assert child.wait(30) == -9
        assert not kill(process)


def test_kill_of_all_processes_includes_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    environment = {**os.environ, "ROLLFLOW_HOME": str(tmp_path)}
    children = [subprocess.Popen(sleep, env=environment) for _ in range(2)]
    try:
        until(lambda: len(list(mine(tmp_path))) == 2)
        looks = [1]  # at the first check there is one process

        def seen(home: Path) -> list[psutil.Process]:
            return list(mine(home))[: looks.pop() if looks else None]

        monkeypatch.setattr(victims, "mine", seen)
        kill_everything(tmp_path)
        assert list(mine(tmp_path)) == []
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_flow_runs_are_identified_by_their_tags() -> None:
    config = RunConfig()
    given = [build_tags(config, "r", role)[-1] for role in ("rollout", "reward", "train", "supervisor")]
    assert given == [*victims.STAGES.values(), victims.SUPERVISOR]


def test_kill_table_includes_the_kill_that_ended_the_run(tmp_path: Path) -> None:
    """A kill that ended the run is in the table, which otherwise would show only survived kills."""

    class Stuck(Victim):
        def __init__(self) -> None:
            self.engine, self.versions, self.home = "timed", 100, tmp_path
            self.struck: str | None = None

        @property
        def newest(self) -> int:
            return 3

        def version(self) -> int:
            return self.newest

        def strike(self, role: str, draw: random.Random, *, record: bool = True) -> Kill:
            if role == "scheduler":
                return Kill(role, 1.0, 2.0, True)
            self.struck = role
            raise RuntimeError("waited 180 s for a living learner")

        def wait_version(self, version: int, seconds: float) -> None:
            pass

        def finish(self, kills: list[Kill], seconds: float) -> Outcome:
            return Outcome("timed", kills, right=False)

    outcome = chaos._struck(Stuck(), ["scheduler", "learner", "scheduler"], 0, settled=False)
    assert [(kill.role, math.isinf(kill.to_progress)) for kill in outcome.kills] == [
        ("scheduler", False),
        ("learner", True),
    ]
    _, rows = table_of("timed", [outcome])
    found = {(row.case, row.metric): row.value for row in rows}
    assert found["timed: learner", "kills"] == 1
    assert found["timed: learner", "runs that ended right"] == 0
    assert math.isinf(found["timed: learner", "seconds to progress, worst"])
    assert found["timed: scheduler", "seconds to progress, worst"] == 2.0


@pytest.mark.long
def test_inspect_reports_trajectories_of_a_lost_batch_as_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of lost trajectories is reported, although the audit reports the lost batch as one object."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    context = prepare_small(tmp_path)
    train_small(context)
    victim = object.__new__(Victim)
    victim.home = tmp_path / "home"
    victim.engine, victim.versions, victim.groups, victim.group_size = "timed", 6, GROUPS, SIZE
    victim.store, victim.recoveries = context.store, RecoveryLog(context.store)
    victim.process = cast(Any, SimpleNamespace(wait=lambda seconds: 0))
    before = victim.finish([], 1)
    assert (before.right, before.lost) == (True, 0)
    batch = committed(context.store, 3).body
    assert isinstance(batch, BatchCommitted)
    context.store.delete(batch.file.path)
    after = victim.finish([], 1)
    assert (after.right, after.lost) == (False, GROUPS * SIZE)


def test_recovery_time_is_measured_for_each_role_separately() -> None:
    assert set(ROLES) - set(RECORDED_AS) == {"reward worker"}
    assert is_record_of("engine", "engine-1")
    assert is_record_of("scheduler", "rollout")
    for role, other in (("scheduler", "rollout stage"), ("rollout flow", "rollout"), ("engine", "learner")):
        assert not is_record_of(role, other)
    assert not is_record_of("reward worker", "reward")
