"""Keeps `rollflow serve` running in the background: restarts it when its process dies. The number of restarts of
`rollflow serve` is limited.

    serve --background --> this process --> serve --> Prefect server, MLflow, Ray cluster, runner

This process holds the lock `up.keeper` in the run home while it lives; `rollflow serve --end` ends this process and
`serve`. `serve` is not restarted if a user has ended it, or if it failed to start and reported the reason. The services
of a dead `serve` end by themselves (see `services.process`); a restart waits until their addresses are free.

    python -m rollflow.flows.keepalive.stack [OPTIONS OF SERVE]
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rollflow.flows.keepalive.restarts import RestartBudget, RestartsExhausted
from rollflow.flows.locations import run_home
from rollflow.flows.services import stack
from rollflow.flows.services.home_server import is_free, read_addresses
from rollflow.flows.services.stop_flag import StopFlag
from rollflow.storage.errors import ConfigError
from rollflow.tasks.run.config import RecoveryConfig

POLL_SECONDS = 0.5
# Longest wait in seconds until the servers of a dead `rollflow serve` have ended and freed their ports.
PORT_SECONDS = 30.0
# Longest wait in seconds until `rollflow serve` ends after a signal. `rollflow serve --end` waits longer than this.
END_SECONDS = 60.0
NAME = "the stack"


def keep_stack(place: Path, command: Sequence[str], limits: RecoveryConfig, ended: StopFlag) -> int:
    """Run `command` in a child process, and restart it when it dies. Return the exit code of `command` once the command
    ends with 0, fails to start, or `ended` is set.

    Raises:
        RestartsExhausted: the command died too often.
    """
    budget = RestartBudget(limits)
    while True:
        child, was_up = subprocess.Popen(command), False
        while child.poll() is None:
            was_up = was_up or stack.came_up(place, child.pid)
            if ended.wait(POLL_SECONDS):
                return _end(child)
        if not (was_up or stack.came_up(place, child.pid)) or child.returncode == 0:
            return child.returncode
        pause = budget.spend(NAME, f"exit code {child.returncode}")
        print(f"{NAME} is restarted, because its process ended with exit code {child.returncode}", flush=True)
        _await_ports(place)
        if ended.wait(pause):
            return 0


def _end(child: subprocess.Popen[bytes]) -> int:
    """End the process and return its exit code; kill the process if it takes too long. The servers of a killed
    `rollflow serve` end by themselves.
    """
    child.terminate()
    try:
        return child.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def _await_ports(place: Path) -> None:
    """Wait until the ports of MLflow and Ray are free, so that a restarted `rollflow serve` can use them. The wait for
    free ports ends after `PORT_SECONDS`.
    """
    limit, known = time.monotonic() + PORT_SECONDS, read_addresses(place)
    while time.monotonic() < limit and not all(is_free(known[name]) for name in ("mlflow", "ray") if name in known):
        time.sleep(POLL_SECONDS)


def main() -> int:
    """Run `rollflow serve`, restart it when it dies, and return the exit code."""
    place, ended = run_home(), StopFlag()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    command = [sys.executable, "-m", "rollflow.flows.commands.cli", "serve", *sys.argv[1:]]
    try:
        with stack.hold_keeper(place):
            return keep_stack(place, command, RecoveryConfig(), ended)
    except RestartsExhausted as error:
        print(f"rollflow: {error}", file=sys.stderr, flush=True)
        return 1
    except ConfigError as error:
        print(f"rollflow: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
