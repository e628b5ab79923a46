"""Kills every role of whole runs with SIGKILL at random moments, and measures recovery times and losses.

`python -m benchmarks.chaos` makes 200 kills on the timed engine and 20 on vLLM; `--s3 20` makes 20 more kills on S3
behind a proxy that corrupts 2% of the answers. A kill is counted once the process is gone. The run has survived a kill
when the role runs again, a version was published after that, *and* storage has a recovery of the same role. "seconds to
progress" is the time from the kill until all three conditions are met, or `inf` if the run did not recover. "seconds to
progress" is longer than "seconds to a version", because other roles may publish the next version earlier. "own record"
is the number of kills that have their own recovery record, because two deaths within a second may share one record.
Deaths of reward workers are not recorded.

Lost and duplicated trajectories are those that the audit of each finished run finds. Regenerated trajectories are those
that the recoveries report. A run allows `RESTARTS` restarts per role, more than the default, because the benchmark
tests each recovery and not the limit on restarts.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import psutil
from rich.console import Console

from benchmarks.chaos_table import EVERYTHING, RESTARTS, Kill, Outcome, table_of
from benchmarks.faulty_s3 import faulty_s3
from benchmarks.report import Row, arguments
from benchmarks.victims import (
    FLOWS,
    RECORDED_AS,
    ROLES,
    VLLM_ROLES,
    find,
    is_record_of,
    kill,
    kill_everything,
    works,
)
from rollflow.storage.audit.audit import audit
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects import open_store
from rollflow.storage.run_records.recoveries import RecoveryLog
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.expectations import expected_of

ENGINES = ("engine", "vllm core")  # with vLLM, these processes start seconds before they can serve requests
LIMIT_SECONDS = 180.0  # longest wait for one recovery
RECORD_SECONDS = 30.0  # longest wait for the record of a complete recovery
LEFT = 80  # versions that a run must have left before another kill, so that the run does not end before the recovery
BUCKET, ON_S3 = "chaos", "timed, on S3:"

RECIPE = (
    """
name = "chaos"
seed = {seed}
versions = {versions}
async_ratio = 2
groups = 8
group_size = 4

[policy.cold_start]
hidden_size = 64
layers = 1
heads = 2
target_accuracy = 0.01
evaluate_every = 5

[engine]
kind = "{engine}"
replicas = 2
max_concurrent_requests = 16
max_new_tokens = 16
{timing}

[evaluation]
prompts = 8
every = 0
"""
    + f"""
[recovery]
restarts = {RESTARTS}
backoff_seconds = 0.2
"""
)
TIMING = {"timed": "median_tokens = 8\nseconds_per_token = 0.02", "vllm": ""}


class Victim:
    """A whole run from the command line, whose processes are killed."""

    def __init__(
        self, home: Path, recipe: str, *options: str, endpoint: str | None = None, store: str | None = None
    ) -> None:
        """Prepare a run. With an S3 `endpoint`, the run is stored in `store`; without one, in a folder."""
        self.home, parsed, self._endpoint = home, tomllib.loads(recipe), endpoint
        self.engine, self.versions = parsed["engine"]["kind"], parsed["versions"]
        self.groups, self.group_size = parsed["groups"], parsed["group_size"]
        home.mkdir(parents=True, exist_ok=True)
        self.recipe = home / "recipe.toml"
        self.recipe.write_text(recipe)
        self.store = open_store(f"{store or home / 'store'}/runs/chaos")
        self.log, self.recoveries = Log(self.store), RecoveryLog(self.store)
        self.process = self._start("run", str(self.recipe), "--run-id", "chaos", *options)
        self.struck: str | None = None  # the role that was killed, until the run has survived this kill

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "ROLLFLOW_HOME": str(self.home)}
        environment.pop("PREFECT_API_URL", None)
        environment |= {"AWS_ENDPOINT_URL_S3": self._endpoint} if self._endpoint else {}
        log = (self.home / "output.log").open("ab")
        command = [sys.executable, "-m", "rollflow.flows.commands.cli", *arguments]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def version(self) -> int:
        """Return the newest published version."""
        self.log.follow()
        return self.newest

    @property
    def newest(self) -> int:
        """The newest version when the log was last read."""
        return self.log.state.version

    def wait_version(self, version: int, seconds: float) -> None:
        """Wait until `version` is published; raise if the run ends before."""
        limit = time.monotonic() + seconds
        while self.version() < version:
            if self.process.poll() is not None:
                raise RuntimeError(f"the run ended (exit code {self.process.returncode}): {self.tail()}")
            if time.monotonic() > limit:
                raise RuntimeError(f"waited {seconds:g} s for version {version}, at {self.newest}: {self.tail()}")
            time.sleep(0.02)

    def strike(self, role: str, draw: random.Random, *, record: bool = True) -> Kill:
        """Kill one process of `role`. Wait until the role and the run are back and, if `record` is true, until the
        recovery is stored.
        """
        before = sorted(self._wait_role(role, set()), key=lambda process: process.pid)
        victim, began = draw.choice(before), time.monotonic()
        version, recorded = self.version(), self._recovered(role)
        if not kill(victim):  # the process had ended by itself, so this kill is not counted
            return self.strike(role, draw, record=record)
        self.struck = role
        first: list[float] = []  # the time when the first version after the kill was seen

        def watch() -> None:
            if not first and self.version() > version:
                first.append(time.monotonic())

        # A second reward worker helps while the first is slow, so it is restarted only when it is needed again.
        self._wait_role(role, {victim.pid}, 1 if role == "reward worker" else len(before), watch)
        if self.engine == "vllm" and role in ENGINES:
            self._wait(lambda: self._recovered(role) > recorded, "an engine that serves", watch)
        self.wait_version(self.version() + 1, LIMIT_SECONDS)
        now = time.monotonic()
        self.struck = None
        found = self._is_recorded(role, recorded, watch) if record and role in RECORDED_AS else None
        return Kill(role, (first or [now])[0] - began, (time.monotonic() if found else now) - began, found)

    def _is_recorded(self, role: str, before: int, watch: Callable[[], None]) -> bool:
        """Wait for the record of the recovery; return whether it was stored within the time limit."""
        limit = time.monotonic() + RECORD_SECONDS
        while (found := self._recovered(role)) <= before and time.monotonic() < limit:
            watch()
            time.sleep(0.05)
        return found > before

    def settle(self) -> None:
        """Wait until every flow runs again, so that the next death is noticed."""
        for role in FLOWS:
            self._wait_role(role, set())

    def strike_everything(self) -> Kill:
        """Kill all processes at once, then resume the run."""
        began = time.monotonic()
        kill_everything(self.home)
        self.process.wait()
        version, self.struck = self.version(), EVERYTHING
        self.process = self._start("resume", "chaos")
        self.wait_version(version + 1, LIMIT_SECONDS)
        self.struck = None
        return Kill(EVERYTHING, time.monotonic() - began, time.monotonic() - began)

    def _wait_role(
        self, role: str, gone: set[int], count: int = 1, watch: Callable[[], None] = lambda: None
    ) -> list[psutil.Process]:
        found: list[psutil.Process] = []

        def lives() -> bool:
            found[:] = [process for process in find(self.home, role) if process.pid not in gone]
            return len(found) >= count and all(self._works(role, process) for process in found)

        self._wait(lives, f"a living {role}", watch)
        return found

    def _wait(self, done: Callable[[], bool], what: str, watch: Callable[[], None]) -> None:
        limit = time.monotonic() + LIMIT_SECONDS
        while True:
            watch()
            if done():
                return
            if time.monotonic() > limit:
                raise RuntimeError(f"waited {LIMIT_SECONDS:g} s for {what}: {self.tail()}")
            time.sleep(0.05)

    def _recovered(self, role: str) -> int:
        return sum(is_record_of(role, one.role) for one in self.recoveries.read())

    def _works(self, role: str, process: psutil.Process) -> bool:
        try:
            return works(self.home, role, process)
        except psutil.Error:
            return False

    def tail(self) -> str:
        """Return the end of the command's output."""
        return (self.home / "output.log").read_text(errors="replace")[-1500:]

    def finish(self, kills: list[Kill], seconds: float) -> Outcome:
        """Wait for the run's end, then audit it."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            kill_everything(self.home)
            code = -1
        report = audit(self.store, deep=True, expected=expected_of(RunContext(self.store.uri, self.home / "cache")))
        regenerated: dict[str, int] = defaultdict(int)
        for recovery in self.recoveries.read():
            regenerated[recovery.role] += recovery.trajectories
        # the expected number of trajectories, because a lost batch of many trajectories is only one violation
        trained = report.versions * self.groups * self.group_size
        kinds = [violation.kind for violation in report.violations]
        return Outcome(
            self.engine,
            kills,
            right=code == 0
            and report.clean
            and (report.versions, report.trajectories)
            == (self.versions, self.versions * self.groups * self.group_size),
            trained=report.trajectories,
            lost=max(kinds.count("missing") * self.group_size, trained - report.trajectories),
            doubled=kinds.count("duplicate") * self.group_size,
            violations=[f"{v.kind}: {v.where}: {v.what}" for v in report.violations],
            regenerated=dict(regenerated),
        )


def one_run(
    home: Path, engine: str, roles: Sequence[str], seed: int, versions: int, *, settled: bool = False, s3: bool = False
) -> Outcome:
    """Execute a run with these kills, in this order and at random moments, until its end.

    If `settled` is true, wait before each kill until all flows run again. If `s3` is true, store the run on S3, behind
    a proxy that corrupts answers.
    """
    recipe = RECIPE.format(seed=seed, versions=versions, engine=engine, timing=TIMING[engine])
    bucket = f"{BUCKET}-{seed}"  # the S3 server in this process still has the buckets of earlier runs
    with faulty_s3(bucket, seed) if s3 else nullcontext() as endpoint:
        store = f"s3://{bucket}" if s3 else None
        options = ("--set", f"store.uri={store}") if s3 else ()
        return _struck(Victim(home, recipe, *options, endpoint=endpoint, store=store), roles, seed, settled=settled)


def _struck(victim: Victim, roles: Sequence[str], seed: int, *, settled: bool) -> Outcome:
    """Kill the chosen roles one by one, then wait for the run's end."""
    draw, kills = random.Random(seed), list[Kill]()
    try:
        victim.wait_version(2, 300)
        for role in roles:
            if settled:
                victim.settle()
            time.sleep(draw.uniform(0.0, 1.5))
            kills.append(victim.strike_everything() if role == EVERYTHING else victim.strike(role, draw))
            made = kills[-1]
            print(
                f"  {victim.engine} v{victim.newest} {role}: {made.to_version:.1f} s, {made.to_progress:.1f} s",
                flush=True,
            )
            if victim.version() > victim.versions - LEFT:
                break
        return victim.finish(kills, 600)
    except RuntimeError as error:
        print(f"  {error}", flush=True)
        if victim.struck:
            kills.append(Kill(victim.struck, math.inf, math.inf))
        outcome = victim.finish(kills, 1)
        outcome.violations.append(str(error))
        return outcome
    finally:
        kill_everything(victim.home)


def schedule(roles: Sequence[str], kills: int, seed: int) -> list[str]:
    """Return `kills` roles in random order, each about equally often."""
    draw = random.Random(seed)
    rounds = [draw.sample(roles, len(roles)) for _ in range(-(-kills // len(roles)))]
    return [role for one in rounds for role in one][:kills]


def campaign(
    engine: str, roles: Sequence[str], kills: int, options: tuple[int, int, int], *, s3: bool = False
) -> list[Outcome]:
    """Execute runs until all kills are made. `options` has the kills per run, the versions per run, and the seed."""
    a_run, versions, seed = options
    left = schedule(roles, kills, seed)
    outcomes: list[Outcome] = []
    while left:
        with tempfile.TemporaryDirectory(prefix="chaos-") as place:
            print(f"run {len(outcomes) + 1} on {engine}: {len(left)} kills to go", flush=True)
            home = Path(place) / "home"
            outcomes.append(one_run(home, engine, left[:a_run], seed + len(outcomes), versions, s3=s3))
        done = len(outcomes[-1].kills)
        left = left[max(done, 1) :]
    return outcomes


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--timed", type=int, default=200, help="kills on the timed engine")
    parser.add_argument("--vllm", type=int, default=20, help="kills on vLLM")
    parser.add_argument("--s3", type=int, default=0, help="kills on the timed engine, on S3 with 2%% of faults")
    parser.add_argument("--roles", nargs="*", help="only these roles")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows: list[Row] = []
    right = True
    for engine, kills, roles, a_run, versions in (
        ("timed", options.timed, (*ROLES, EVERYTHING), 50, 1300),
        ("vllm", options.vllm, VLLM_ROLES, 20, 1500),
        (ON_S3, options.s3, ROLES, 20, 600),
    ):
        if not kills:
            continue
        kind, numbers = "timed" if engine == ON_S3 else engine, (a_run, versions, options.seed)
        outcomes = campaign(kind, options.roles or roles, kills, numbers, s3=engine == ON_S3)
        table, found = table_of(engine, outcomes)
        rows += found
        right &= all(outcome.right for outcome in outcomes)
        Console(width=130).print(table)
        for outcome in outcomes:
            for violation in outcome.violations:
                print(f"violation: {violation}")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
