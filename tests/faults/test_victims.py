"""What chaos takes for a kill, and for a role's own recovery."""

from __future__ import annotations

import subprocess
import sys

import psutil

from benchmarks.victims import RECORDED_AS, ROLES, is_record_of, kill


def test_a_kill_counts_when_the_process_is_gone_and_only_once() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        process = psutil.Process(child.pid)
        assert kill(process)  # a zombie until this process asks how it ended: gone all the same
        assert child.wait(30) == -9
        assert not kill(process)


def test_another_roles_recovery_is_not_the_roles_own() -> None:
    assert set(ROLES) - set(RECORDED_AS) == {"reward worker"}
    assert is_record_of("engine", "engine-1")
    assert is_record_of("scheduler", "rollout")
    for role, other in (("scheduler", "rollout stage"), ("rollout flow", "rollout"), ("engine", "learner")):
        assert not is_record_of(role, other)
    assert not is_record_of("reward worker", "reward")
