"""Tests whole runs under difficult conditions: two resumes at once, no Ray head, a busy machine, an early stop.

`python -m benchmarks.liveness` executes several rounds of each condition (`--resumes`, `--heads`, `--busy`, `--stops`),
and prints a table: rounds, successful rounds, and seconds per round (median, longest).

- **two resumes**: all processes of a run are killed, then two `rollflow resume` start at the same moment. Success: one
  resume is refused (exit code 2, with a sentence that names the other resume), and then the run publishes two more
  versions.
- **head away**: GCS, raylet and runner of a run are killed at once, and the head stays away for `--away` seconds.
  Success: the same command publishes two more versions.
- **busy machine**: a run starts while four other processes compute. Success: version 2 is published, and no restart is
  recorded.
- **stop while it starts**: `rollflow stop` is called as soon as the status of a run is "starting". Success: both
  commands end in order, with exit codes 0 and 130.

The run of a row ends after its rounds, and its audit must be clean.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.chaos import RECIPE, TIMING, Victim
from benchmarks.report import Row, arguments, publish
from benchmarks.victims import find, kill, kill_everything
from rollflow.flows.commands.cli.exit_codes import INTERRUPTED
from rollflow.flows.ray_cluster.ray_head import RayHead
from rollflow.flows.views.status import RunStatus
from rollflow.storage.audit.audit import audit
from rollflow.storage.errors import Missing
from rollflow.tasks.actors.lease import STATUS

VERSIONS = 100_000  # number of versions, so large that the run does not end before the rounds
ROUND_SECONDS = 600.0  # the longest wait for one event, which only ends a hang
BUSY = 4
SPIN = "while True: pass"


@dataclass
class Rounds:
    """The result of one row: the seconds of each successful round, and the reasons why rounds failed."""

    what: str
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def play(self, play: Callable[[], None]) -> None:
        """Play one round."""
        began = time.monotonic()
        try:
            play()
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            self.wrong.append(str(error))
            print(f"  {self.what}: {error}", flush=True)
        else:
            self.seconds.append(time.monotonic() - began)
            print(f"  {self.what}: {self.seconds[-1]:.1f} s", flush=True)

    def record_audit(self, victim: Victim) -> None:
        """Record the violations of the run's audit."""
        self.wrong += [f"{one.kind}: {one.where}: {one.what}" for one in audit(victim.store, deep=True).violations]


def recipe(seed: int = 1) -> str:
    """Return the recipe of `benchmarks.chaos` for the timed engine, with the default limit on restarts."""
    text = RECIPE.format(seed=seed, versions=VERSIONS, engine="timed", timing=TIMING["timed"])
    return text.partition("[recovery]")[0]


class Early(Victim):
    """A run that is observed from its start."""

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start another command in the run's home."""
        return self._start(*arguments)

    def await_status(self, phase: str) -> None:
        """Wait for this status of the run.

        Raises:
            RuntimeError: the run does not reach the status.
        """
        limit = time.monotonic() + ROUND_SECONDS
        while time.monotonic() < limit and self.process.poll() is None:
            with contextlib.suppress(Missing):
                if RunStatus.from_json(self.store.get(STATUS)).phase == phase:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"the run was never {phase}: {self.tail()}")


class TwoResumes(Victim):
    """A run that two commands resume at once."""

    def play(self) -> None:
        """Play one round; afterwards the accepted command is the run's process.

        Raises:
            RuntimeError: not exactly one command was refused, or the accepted command does not continue the run.
        """
        kill_everything(self.home)
        self.process.wait()
        both = [self._start("resume", "chaos") for _ in range(2)]
        limit = time.monotonic() + ROUND_SECONDS
        while all(one.poll() is None for one in both) and time.monotonic() < limit:
            time.sleep(0.05)
        ended = [one for one in both if one.poll() is not None]
        self.process = next((one for one in both if one.poll() is None), both[0])
        if [one.returncode for one in ended] != [2] or "is already running" not in self.tail():
            raise RuntimeError(f"exit codes {[one.returncode for one in ended]}: {self.tail()}")
        self.wait_version(self.version() + 2, ROUND_SECONDS)


class OnItsCluster(Victim):
    """A run on a Ray cluster that was started by another process than the run's command."""

    def play(self, head: RayHead, away: float) -> None:
        """Play one round: the head is killed together with the runner, and the head comes back after `away` seconds.

        Raises:
            RuntimeError: the run does not continue.
        """
        victims = [psutil.Process(pid) for pid in head.processes]
        for process in [*find(self.home, "runner"), *victims]:
            kill(process)
        version = self.version()
        time.sleep(away)
        head.relaunch()
        head.wait()
        self.wait_version(version + 2, ROUND_SECONDS)


def two_resumes(rounds: int) -> Rounds:
    found = Rounds("two resumes")
    with _home() as home:
        victim = TwoResumes(home, recipe())
        victim.wait_version(1, ROUND_SECONDS)
        for _ in range(rounds):
            found.play(victim.play)
        kill_everything(home)
        found.record_audit(victim)
    return found


def head_away(rounds: int, away: float) -> Rounds:
    found = Rounds(f"head away for {away:g} s")
    with _home() as home, RayHead(home.parent / "elsewhere") as head:
        os.environ.update(head.env)  # the run needs these variables to connect to the head
        # The run needs more restarts than by default, because the rounds follow each other within minutes.
        options = ("--set", f"cluster.address={head.address}", "--set", "recovery.restarts=100")
        victim = OnItsCluster(home, recipe(), *options)
        victim.wait_version(1, ROUND_SECONDS)
        for _ in range(rounds):
            found.play(lambda: victim.play(head, away))
        kill_everything(home)
        found.record_audit(victim)
    return found


def early_stop(rounds: int) -> Rounds:
    found = Rounds("stop while it starts")
    for seed in range(rounds):
        with _home() as home:
            found.play(partial(_stop_early, home, seed))
    return found


def _stop_early(home: Path, seed: int) -> None:
    victim = Early(home, recipe(seed))
    victim.await_status("starting")
    stop = victim.start("stop", "chaos")
    if (code := stop.wait(ROUND_SECONDS)) or (code := victim.process.wait(ROUND_SECONDS)) != INTERRUPTED:
        raise RuntimeError(f"exit code {code}: {victim.tail()}")


def busy_machine(rounds: int) -> Rounds:
    found = Rounds(f"start beside {BUSY} busy loops")
    for seed in range(rounds):
        with _home() as home, _busy():
            found.play(partial(_start_busy, home, seed))
    return found


def _start_busy(home: Path, seed: int) -> None:
    victim = Victim(home, recipe(seed))
    victim.wait_version(2, ROUND_SECONDS)
    spent = [f"{one.role}: {one.reason}" for one in victim.recoveries.read()]
    if spent or "is restarted" in victim.tail() + _runner_log(home):
        raise RuntimeError(f"restarts were spent: {spent or _restarts(home)}")


def _runner_log(home: Path) -> str:
    return "".join(log.read_text(errors="replace") for log in home.glob("logs/*/runner.log"))


def _restarts(home: Path) -> list[str]:
    return [line[:300] for line in _runner_log(home).splitlines() if "is restarted" in line]


@contextlib.contextmanager
def _home() -> Iterator[Path]:
    """Yield a run home, and end all its processes afterwards."""
    with tempfile.TemporaryDirectory(prefix="liveness-") as place:
        home = Path(place) / "home"
        try:
            yield home
        finally:
            kill_everything(home)


@contextlib.contextmanager
def _busy() -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(BUSY)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--resumes", type=int, default=20)
    parser.add_argument("--heads", type=int, default=10)
    parser.add_argument("--busy", type=int, default=5)
    parser.add_argument("--stops", type=int, default=5)
    parser.add_argument("--away", type=float, default=40.0, help="seconds that a Ray head stays away")
    options = parser.parse_args()
    asked: tuple[tuple[int, Callable[[int], Rounds]], ...] = (
        (options.resumes, two_resumes),
        (options.heads, partial(head_away, away=options.away)),
        (options.busy, busy_machine),
        (options.stops, early_stop),
    )
    found = [play(count) for count, play in asked if count]
    table, rows = Table("what", "rounds", "right", "median, s", "longest, s"), list[Row]()
    for one in found:
        median, longest = statistics.median(one.seconds or [0.0]), max(one.seconds, default=0.0)
        right, count = len(one.seconds), len(one.seconds) + len(one.wrong)
        table.add_row(one.what, str(count), str(right), f"{median:.1f}", f"{longest:.1f}")
        rows += [Row(one.what, "rounds", count), Row(one.what, "right", right), Row(one.what, "seconds", median)]
    Console(width=110).print(table)
    publish(rows, "liveness", options.json)
    for one in found:
        for why in one.wrong:
            print(f"{one.what}: {why}")
    sys.exit(1 if any(one.wrong for one in found) else 0)


if __name__ == "__main__":
    main()
