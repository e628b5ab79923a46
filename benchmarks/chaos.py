"""SIGKILL at random, to every role, on whole runs: what it costs, and what is lost (nothing).

`python -m benchmarks.chaos` makes 200 kills on the timed engine and 20 on vLLM. A kill counts as survived when the
role lives again *and* a version was published after that: "seconds to progress" is the time from the kill until
then (so it is longer than the time until the next version, which other roles may publish meanwhile; that one is shown
as "seconds to a version"). Trajectories lost and doubled are what the audit finds from storage at each run's end;
regenerated ones are what the recoveries say was generated again.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.report import Row, arguments
from benchmarks.victims import FLOWS, ROLES, VLLM_ROLES, find, kill, kill_everything, works
from rollflow.storage.audit import audit
from rollflow.storage.objects import open_store
from rollflow.storage.policies import PolicyStore
from rollflow.storage.recoveries import RecoveryLog

EVERYTHING = "everything"
ENGINES = ("engine", "vllm core")  # on vLLM their processes are there seconds before they can serve
LIMIT_SECONDS = 180.0  # longest wait for one recovery
TARGET_SECONDS = 10.0

RECIPE = """
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
slots = 16
max_new_tokens = 16
{timing}

[evaluation]
prompts = 8
every = 0

[recovery]
restarts = 1000
backoff_seconds = 0.2
"""
TIMING = {"timed": "median_tokens = 8\nseconds_per_token = 0.02", "vllm": ""}


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: seconds until a version was published, and until the role lived again and one was published."""

    role: str
    to_version: float
    to_progress: float


@dataclass(slots=True)
class Outcome:
    """One run: how it ended, and what storage says of it."""

    engine: str
    kills: list[Kill]
    right: bool
    lost: int = 0
    doubled: int = 0
    violations: list[str] = field(default_factory=list)
    regenerated: dict[str, int] = field(default_factory=dict)


class Victim:
    """A whole run by the command line."""

    def __init__(self, home: Path, recipe: str, *options: str) -> None:
        self.home, parsed = home, tomllib.loads(recipe)
        self.engine, self.versions = parsed["engine"]["kind"], parsed["versions"]
        home.mkdir(parents=True, exist_ok=True)
        self.recipe = home / "recipe.toml"
        self.recipe.write_text(recipe)
        self.store = open_store(str(home / "store/runs/chaos"))
        self.policies, self.recoveries = PolicyStore(self.store), RecoveryLog(self.store)
        self.process = self._start("run", str(self.recipe), "--run-id", "chaos", *options)
        self.newest = 0

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "ROLLFLOW_HOME": str(self.home)}
        environment.pop("PREFECT_API_URL", None)
        log = (self.home / "output.log").open("ab")
        command = [sys.executable, "-m", "rollflow.flows.cli", *arguments]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def version(self) -> int:
        """The newest published version."""
        self.newest = max(self.newest, self.policies.latest(self.newest))
        return self.newest

    def wait_version(self, version: int, seconds: float) -> None:
        """Wait until `version` is published; the run must not end meanwhile."""
        limit = time.monotonic() + seconds
        while self.version() < version:
            if self.process.poll() is not None:
                raise RuntimeError(f"the run ended (exit code {self.process.returncode}): {self.tail()}")
            if time.monotonic() > limit:
                raise RuntimeError(f"waited {seconds:g} s for version {version}, at {self.newest}: {self.tail()}")
            time.sleep(0.02)

    def strike(self, role: str, draw: random.Random) -> Kill:
        """Kill one process of `role` and wait until the role and the run are back."""
        before = {process.pid for process in self._wait_role(role, set())}
        victim = draw.choice(sorted(before))
        began, version, served = time.monotonic(), self.version(), self._engines_recovered()
        for process in find(self.home, role):
            if process.pid == victim:
                kill(process)
        first: list[float] = []  # when a version was seen that was not there at the kill

        def watch() -> None:
            if not first and self.version() > version:
                first.append(time.monotonic())

        self._wait_role(role, {victim}, len(before), watch)
        if self.engine == "vllm" and role in ENGINES:
            self._wait(lambda: self._engines_recovered() > served, "an engine that serves", watch)
        self.wait_version(self.version() + 1, LIMIT_SECONDS)
        now = time.monotonic()
        return Kill(role, (first or [now])[0] - began, now - began)

    def settle(self) -> None:
        """Wait until every flow runs again, so that the next death has a witness."""
        for role in FLOWS:
            self._wait_role(role, set())

    def strike_everything(self) -> Kill:
        """Kill all of it at once; then `resume`."""
        began = time.monotonic()
        kill_everything(self.home)
        self.process.wait()
        version = self.version()
        self.process = self._start("resume", "chaos")
        self.wait_version(version + 1, LIMIT_SECONDS)
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

    def _engines_recovered(self) -> int:
        return sum(one.role.startswith("engine-") for one in self.recoveries.read())

    def _works(self, role: str, process: psutil.Process) -> bool:
        try:
            return works(self.home, role, process)
        except psutil.Error:
            return False

    def tail(self) -> str:
        """The end of what the command printed."""
        return (self.home / "output.log").read_text(errors="replace")[-1500:]

    def finish(self, kills: list[Kill], seconds: float) -> Outcome:
        """Let the run end, then audit it."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            kill_everything(self.home)
            code = -1
        report = audit(self.store)
        regenerated: dict[str, int] = defaultdict(int)
        for recovery in self.recoveries.read():
            regenerated[recovery.role] += recovery.trajectories
        kinds = [violation.kind for violation in report.violations]
        return Outcome(
            self.engine,
            kills,
            right=code == 0 and report.clean and report.versions == self.versions,
            lost=kinds.count("missing"),
            doubled=kinds.count("duplicate"),
            violations=[f"{v.kind}: {v.where}: {v.what}" for v in report.violations],
            regenerated=dict(regenerated),
        )


def one_run(
    home: Path, engine: str, roles: Sequence[str], seed: int, versions: int, *, settled: bool = False
) -> Outcome:
    """A run with these kills, in this order, at random moments; then to its end.

    `settled`: each death waits until the flows are back from the one before.
    """
    draw = random.Random(seed)
    victim = Victim(home, RECIPE.format(seed=seed, versions=versions, engine=engine, timing=TIMING[engine]))
    kills: list[Kill] = []
    try:
        victim.wait_version(2, 300)
        for role in roles:
            if settled:
                victim.settle()
            time.sleep(draw.uniform(0.0, 1.5))
            kills.append(victim.strike_everything() if role == EVERYTHING else victim.strike(role, draw))
            made = kills[-1]
            print(f"  {engine} v{victim.newest} {role}: {made.to_version:.1f} s, {made.to_progress:.1f} s", flush=True)
            if victim.version() > versions - 8:
                break
        return victim.finish(kills, 600)
    except RuntimeError as error:
        print(f"  {error}", flush=True)
        outcome = victim.finish(kills, 1)
        outcome.violations.append(str(error))
        return outcome
    finally:
        kill_everything(home)


def schedule(roles: Sequence[str], kills: int, seed: int) -> list[str]:
    """`kills` roles, each about as often, in random order."""
    draw = random.Random(seed)
    rounds = [draw.sample(roles, len(roles)) for _ in range(-(-kills // len(roles)))]
    return [role for one in rounds for role in one][:kills]


def campaign(engine: str, roles: Sequence[str], kills: int, options: tuple[int, int, int]) -> list[Outcome]:
    """Runs one after another until all kills are made. `options`: kills a run, versions a run, seed."""
    a_run, versions, seed = options
    left = schedule(roles, kills, seed)
    outcomes: list[Outcome] = []
    while left:
        with tempfile.TemporaryDirectory(prefix="chaos-") as place:
            print(f"run {len(outcomes) + 1} on {engine}: {len(left)} kills to go", flush=True)
            outcomes.append(one_run(Path(place) / "home", engine, left[:a_run], seed + len(outcomes), versions))
        done = len(outcomes[-1].kills)
        left = left[max(done, 1) :]
    return outcomes


def table_of(engine: str, outcomes: Sequence[Outcome]) -> tuple[Table, list[Row]]:
    """A row for each role, and the same as rows of figures."""
    table = Table(title=f"chaos, {engine} engine", title_justify="left")
    for name in ("role", "kills", "runs right", "to a version, median", "to progress, median", "worst", "lost"):
        table.add_column(name, justify="left" if name == "role" else "right")
    table.add_column("doubled", justify="right")
    table.add_column("regenerated", justify="right")
    rows: list[Row] = []
    for role in dict.fromkeys(k.role for o in outcomes for k in o.kills):
        runs = [o for o in outcomes if any(k.role == role for k in o.kills)]
        made = [k for o in outcomes for k in o.kills if k.role == role]
        regenerated = sum(o.regenerated.get(name, 0) for o in outcomes for name in _recovered_as(role))
        figures = {
            "kills": float(len(made)),
            "runs": float(len(runs)),
            "runs that ended right": float(sum(o.right for o in runs)),
            "seconds to a version, median": statistics.median(k.to_version for k in made),
            "seconds to progress, median": statistics.median(k.to_progress for k in made),
            "seconds to progress, worst": max(k.to_progress for k in made),
            "lost": float(sum(o.lost for o in runs)),
            "doubled": float(sum(o.doubled for o in runs)),
            "regenerated": float(regenerated),
        }
        for name, value in figures.items():
            target = TARGET_SECONDS if name == "seconds to progress, median" and role != EVERYTHING else None
            rows.append(Row(f"{engine}: {role}", name, value, target, value <= target if target else None))
        table.add_row(
            role,
            f"{len(made)}",
            f"{figures['runs that ended right']:.0f}/{len(runs)}",
            *(f"{figures[name]:.1f}" for name in list(figures)[3:6]),
            *(f"{figures[name]:.0f}" for name in list(figures)[6:]),
        )
    return table, rows


def _recovered_as(role: str) -> tuple[str, ...]:
    """The names under which the run wrote down recoveries of a role that generate something again."""
    return {"scheduler": ("rollout",)}.get(role, ())


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--timed", type=int, default=200, help="kills on the timed engine")
    parser.add_argument("--vllm", type=int, default=20, help="kills on vLLM")
    parser.add_argument("--roles", nargs="*", help="only these roles")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows: list[Row] = []
    right = True
    for engine, kills, roles, a_run, versions in (
        ("timed", options.timed, (*ROLES, EVERYTHING), 50, 1300),
        ("vllm", options.vllm, VLLM_ROLES, 20, 1500),
    ):
        if not kills:
            continue
        outcomes = campaign(engine, options.roles or roles, kills, (a_run, versions, options.seed))
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
