"""Tests that a dead `rollflow serve` is restarted a limited number of times, and that `rollflow serve --end` ends it
and its keeper.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rollflow.flows.commands import serve
from rollflow.flows.commands.cli import main
from rollflow.flows.keepalive.restarts import RestartsExhausted
from rollflow.flows.keepalive.stack import keep_stack
from rollflow.flows.services import stack
from rollflow.flows.services.stop_flag import StopFlag
from rollflow.tasks.run.config import RecoveryConfig
from tests.support.waiting import HANG_SECONDS, until

SERVES = """
import os, signal, sys, time
from pathlib import Path
from rollflow.flows.services import stack
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
place = Path(sys.argv[1])
with stack.hold_stack(place):
    if len(sys.argv) > 2:
        sys.exit(int(sys.argv[2]))
    stack.announce(place, stack.Stack(os.getpid(), "http://p", "", "http://m", {}))
    time.sleep(600)
"""
KEEPS = """
import sys, signal
from pathlib import Path
from rollflow.flows.keepalive.stack import keep_stack
from rollflow.flows.services import stack
from rollflow.flows.services.stop_flag import StopFlag
from rollflow.tasks.run.config import RecoveryConfig
ended, place = StopFlag(), Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: ended.set())
with stack.hold_keeper(place):
    keep_stack(place, sys.argv[2:], RecoveryConfig(restarts=2, backoff_seconds=0), ended)
"""


def command(place: Path, *more: str) -> list[str]:
    return [sys.executable, "-c", SERVES, str(place), *more]


def pid_of(place: Path) -> int:
    found: list[int] = []
    until(lambda: found.extend(stack_now.pid for stack_now in [stack.find(place)] if stack_now is not None) or found)
    return found[0]


def test_dead_servers_are_restarted_until_serve_ends(tmp_path: Path) -> None:
    borrowed = stack.BorrowedStack(tmp_path)
    keeper = subprocess.Popen([sys.executable, "-c", KEEPS, str(tmp_path), *command(tmp_path)])
    first = pid_of(tmp_path)
    os.kill(first, signal.SIGKILL)
    until(lambda: stack.find(tmp_path) is None or pid_of(tmp_path) != first)
    assert borrowed.running  # the keeper restarts the servers, so the commands that use them wait
    assert pid_of(tmp_path) != first
    assert stack.end(tmp_path)
    assert keeper.wait() == 0
    assert not borrowed.running
    assert not stack.end(tmp_path)


def test_servers_that_fail_too_often_are_not_restarted(tmp_path: Path) -> None:
    def kills() -> None:
        last = 0
        for _ in range(2):
            until(lambda before=last: pid_of(tmp_path) != before)  # type: ignore[misc]
            last = pid_of(tmp_path)
            os.kill(last, signal.SIGKILL)

    killing = threading.Thread(target=kills)
    killing.start()
    with pytest.raises(RestartsExhausted, match=r"the stack was restarted 1 times .* exit code -9"):
        keep_stack(tmp_path, command(tmp_path), RecoveryConfig(restarts=1, backoff_seconds=0), StopFlag())
    killing.join()


def test_servers_that_fail_after_their_start_are_restarted(tmp_path: Path) -> None:
    """After an error, `rollflow serve` ends in order: no command finds its servers, and it has an exit code."""
    fails = [sys.executable, "-c", SERVES.replace("time.sleep(600)", "time.sleep(1); sys.exit(1)"), str(tmp_path)]
    with pytest.raises(RestartsExhausted, match=r"the stack was restarted 1 times .* exit code 1"):
        keep_stack(tmp_path, fails, RecoveryConfig(restarts=1, backoff_seconds=0), StopFlag())
    assert stack.find(tmp_path) is None


def test_servers_that_ended_on_request_are_not_restarted(tmp_path: Path) -> None:
    done = [sys.executable, "-c", SERVES.replace("time.sleep(600)", "time.sleep(3)"), str(tmp_path)]
    assert keep_stack(tmp_path, done, RecoveryConfig(), StopFlag()) == 0


def test_simultaneous_starts_give_one_set_of_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    keeper = subprocess.Popen([sys.executable, "-c", KEEPS, str(tmp_path), *command(tmp_path)])
    pid_of(tmp_path)
    looks, find = 0, stack.find

    def begun(_: Path) -> bool:
        nonlocal looks
        looks += 1
        return looks > 1  # the servers began to start after the first check

    monkeypatch.setattr(serve, "_is_begun", begun)
    # the servers are not found before that
    monkeypatch.setattr(stack, "find", lambda place: find(place) if looks > 1 else None)
    assert main(["serve", "--background"]) == 0
    assert capsys.readouterr().out.startswith("the servers are up already\n")
    assert "Traceback" not in (tmp_path / "logs" / "up.log").read_text()
    assert stack.end(tmp_path)
    keeper.wait(HANG_SECONDS)


@pytest.mark.parametrize("code", [0, 1, 2])
def test_servers_that_never_started_report_the_reason(tmp_path: Path, code: int) -> None:
    assert keep_stack(tmp_path, command(tmp_path, str(code)), RecoveryConfig(), StopFlag()) == code


def test_signal_during_a_signal_handler_is_handled() -> None:
    """`serve --end` signals the keeper and the serving process, so a process may get two signals at once."""
    told, before, within = StopFlag(), signal.getsignal(signal.SIGALRM), 0

    def again(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def tell(*_: object) -> None:
        nonlocal within
        within += 1
        if within < 3:  # a bound, because a slow machine would never finish handling signals that keep coming
            again(1e-5)
        told.set()
        within -= 1
        if not within:
            again(1e-4)  # the next signal comes after the handler's return

    signal.signal(signal.SIGALRM, tell)
    try:
        again(0.05)  # the first signal; many follow, at any step of the wait
        assert told.wait(HANG_SECONDS)
        assert all(told.wait(0.001) for _ in range(1000))
    finally:
        signal.signal(signal.SIGALRM, lambda *_: None)  # this handler requests no further signal
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_servers_that_do_not_end_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollflow.flows.keepalive.stack.END_SECONDS", 0.5)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open('deaf', 'w'); time.sleep(600)"
    monkeypatch.chdir(tmp_path)
    told = StopFlag()

    def tells() -> None:
        until((tmp_path / "deaf").exists)
        told.set()

    telling = threading.Thread(target=tells)
    telling.start()
    assert keep_stack(tmp_path, [sys.executable, "-c", deaf], RecoveryConfig(), told) == -signal.SIGKILL
    telling.join()
