"""Tests of CPU seconds by role: each process is counted once, and sums stay right when processes or supervisors are
replaced.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rollflow.flows.keepalive.costs import session_costs
from rollflow.flows.keepalive.services import RAY, SERVER
from rollflow.flows.services.process import Runner
from rollflow.flows.views.console import cpu_line
from rollflow.storage.objects import open_store
from rollflow.storage.run_records.usage import CpuCost, CpuUsage, read_usage, store_usage
from rollflow.tasks.runtime import cpu
from rollflow.tasks.runtime.cpu import CpuClock
from tests.support.waiting import until

BURN = "import time\nwhile time.process_time() < {seconds}: pass\n"
BURNT = 0.6  # least measured value for 0.7 CPU seconds, because user and system time are rounded down to ticks of 10 ms


def test_cpu_time_of_a_role_includes_replaced_processes(tmp_path: Path) -> None:
    run = open_store(str(tmp_path))
    first, second = CpuUsage(), CpuUsage()
    first.note([CpuCost("learner", "a:1:1", 10.0), CpuCost("scheduler", "a:2:1", 5.0)])
    first.note([CpuCost("learner", "a:1:1", 30.0)])
    first.note([CpuCost("learner", "a:3:9", 0.5)])  # this process replaced the first one
    store_usage(run, "one", first)
    # these CPU times were measured by another supervisor
    second.note([CpuCost("learner", "a:3:9", 4.0), CpuCost("scheduler", "a:2:1", 4.0)])
    store_usage(run, "two", second)
    assert read_usage(run).totals() == {"learner": 34.0, "scheduler": 5.0}


@pytest.mark.parametrize("damaged", ["", "[]", "null", '{"learner": 3}', '{"learner": {"a": "much"}}'])
def test_damaged_cpu_usage_record_is_skipped(damaged: str, tmp_path: Path) -> None:
    run = open_store(str(tmp_path))
    usage = CpuUsage()
    usage.note([CpuCost("learner", "a:1:1", 3.0)])
    store_usage(run, "one", usage)
    run.put("usage/another.json", damaged.encode())
    assert read_usage(run).totals() == {"learner": 3.0}


def test_actor_reports_cpu_usage_with_its_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "LOOK_SECONDS", -1.0)
    clock = CpuClock("engine", "engine core")
    before = {cost.role: cost.seconds for cost in clock.read()}
    ended = BURN.format(seconds=0.7)
    nested = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {ended!r}])\ninput()\n"
    with subprocess.Popen([sys.executable, "-c", nested], stdin=subprocess.PIPE) as child:
        limit = time.monotonic() + 60
        while clock.read()[1].seconds - before["engine core"] < BURNT:
            assert time.monotonic() < limit
            time.sleep(0.05)
        child.communicate(b"\n")
    assert BURNT <= clock.read()[1].seconds - before["engine core"] < 5.0  # the ended process is counted once


@pytest.mark.long
def test_run_command_counts_cpu_usage_of_its_services(tmp_path: Path) -> None:
    ended = BURN.format(seconds=0.7)
    lines = ["import subprocess, sys, time", f"subprocess.run([sys.executable, '-c', {ended!r}])", "time.sleep(600)"]
    (tmp_path / "burn.py").write_text("\n".join(lines))
    service = Runner(tmp_path / "log", {"PYTHONPATH": str(tmp_path)}, module="burn")
    with service:
        limit, seen = time.monotonic() + 60, CpuUsage()
        while seen.totals().get(SERVER, 0.0) < BURNT:
            assert time.monotonic() < limit
            seen.note(session_costs({SERVER: service}, "none"))
    assert set(seen.seen) == {"command", SERVER}
    assert len(seen.seen["command"]) == len(seen.seen[SERVER]) == 1


def test_service_that_has_ended_adds_no_cpu_usage(tmp_path: Path) -> None:
    service = Runner(tmp_path / "log", {}, module="burn")
    assert service.pid == -1
    assert {cost.role for cost in session_costs({SERVER: service, RAY: service}, "none")} == {"command"}


def test_clock_step_does_not_count_a_process_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the id of a process contained its start time by the wall clock, the process would be counted twice after a
    clock step.
    """
    seen, booted = CpuUsage(), psutil.boot_time()
    for step in (0.0, 3600.0, -3600.0):
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda step=step: booted + step)
        seen.note(session_costs({}, "none"))
    assert len(seen.seen["command"]) == 1


def test_ending_process_has_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel frees the memory of a process, which takes time, before the process counts as ended."""
    monkeypatch.setattr(psutil.Process, "cmdline", lambda _: [])
    with Runner(tmp_path / "log", {}, module="http.server", arguments=["0", "--bind", "127.0.0.1"]) as service:
        until(lambda: service.processes)
        assert {cost.role for cost in session_costs({RAY: service}, "none")} == {"command", RAY}


def test_cpu_share_of_monitoring_processes_is_reported() -> None:
    seconds = {"engine core": 160.0, "learner": 30.0, "prefect server": 5.0, "command": 3.0, "runner": 2.0}
    assert cpu_line(seconds) == "200 s: engine core 80%, learner 15%, prefect server 2%; watching 5.0%"
