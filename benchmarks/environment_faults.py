"""Measures a run in which environments in real worker processes hang, crash and write garbage.

The run is compared with a run without faults. Both have the same worker processes, timed engines, scheduler and
storage, and about the same number of healthy episodes in the measured versions. Two kinds of environment take turns,
prompt by prompt. In the run with faults, 20% of the episodes of one kind hang until their deadline, 10% crash and 5%
write garbage; the other kind never starts, and is left out once its failure budget (`environment.max_failures`) is used
up. All counts are read from the run's storage.

An episode that crashes occupies its worker process for a shorter time than a healthy one, and an episode that hangs
usually for a longer time. The table has the ratio of two rates of healthy episodes: the rate with faults, and the rate
without faults times the share of healthy episodes. If worker processes are never idle, this ratio is t / (sum of share
x seconds, over all faults and healthy episodes), where t is the seconds of a healthy episode. This is the bound in the
table.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faulty_world import EXIT_CODE
from benchmarks.report import Row, at_least, at_most
from rollflow.storage.audit.audit import audit
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import ConfigError
from rollflow.storage.log.entries import BatchCommitted, VersionPublished
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.records import DiscardReason, Outcome, Trajectory
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.environments.foreign.config import GymnasiumEnvironment
from rollflow.tasks.environments.foreign.gym import GymnasiumEpisodes
from rollflow.tasks.scorers.base import Score
from rollflow.testing.environments import build_ports
from tests.support.log_runs import read
from tests.support.pipeline import Pipeline

ROOT = Path(__file__).resolve().parents[1]
VARIABLE = "ROLLFLOW_FAULTS"  # environment variable by which all worker processes of a measurement are found
SHARES = {"hang": 0.2, "crash": 0.05, "exit": 0.05, "garbage": 0.05}
HEALTHY = ""  # the name that stands for "no fault"
AIM = 0.9
TURN_TOKENS = 16
FIRST = 1  # episodes are counted after this version, when all worker processes are busy
# Alpha (`async_ratio`), and the number of last versions that are not counted, because worker processes run out of work.
AHEAD = 2

# how an episode with each fault ends in storage: fault -> outcome, and a part of the reason
ENDINGS: Mapping[str, tuple[Outcome, str]] = {
    HEALTHY: (Outcome.CORRECT, "the environment ended the episode"),
    "hang": (Outcome.TIMEOUT, "took more than environment.turn_seconds"),
    "crash": (Outcome.KILLED, "was killed by SIGSEGV during step"),
    "exit": (Outcome.KILLED, f"exited with code {EXIT_CODE} during step"),
    "garbage": (Outcome.KILLED, "wrote no valid answer to step"),
}
UNEXPLAINED = "unexplained"  # the fault of an episode that matches no line of `ENDINGS`


@dataclass(frozen=True, slots=True)
class FaultSetup:
    """The size and the times of a measurement, in seconds."""

    processes: int = 24
    turns: int = 8
    step: float = 0.2
    generation: float = 0.1
    deadline: float = 2.0
    groups: int = 12
    size: int = 4
    shares: Mapping[str, float] = field(default_factory=lambda: SHARES)
    by_seed: bool = False  # True if the fault depends on the prompt alone
    max_failures: int = 20

    def build_config(self, **options: Any) -> GymnasiumEnvironment:
        """Return the config of one kind of environment."""
        return GymnasiumEnvironment(
            path="benchmarks.faulty_world:FaultyWorld",
            act="benchmarks.faulty_world:act",
            folder=str(ROOT),
            options={"turns": self.turns, "seconds": self.step, "by_seed": self.by_seed, **options},
            at_once=self.processes,
            turn_seconds=self.deadline,
            max_failures=self.max_failures,
        )

    def build_kinds(self, *, is_faulty: bool) -> dict[str, GymnasiumEnvironment]:
        """Return the configs of the kinds of environment, by name."""
        if not is_faulty:
            return {"world": self.build_config()}
        return {"world": self.build_config(shares=dict(self.shares)), "broken": self.build_config(broken=True)}

    def find_bound(self, counts: Mapping[str, int]) -> float:
        """Return the bound in the module's docstring; `counts` has the number of episodes with each fault."""
        until_fault = (self.turns + 1) / 2 * (self.generation + self.step) - self.step
        seconds = dict.fromkeys(self.shares, until_fault) | {HEALTHY: self.turns * (self.generation + self.step)}
        seconds["hang"] = until_fault + self.deadline
        return seconds[HEALTHY] * sum(counts.values()) / sum(seconds[name] * n for name, n in counts.items())


class KindRotation(Environment):
    """An environment that plays prompts in several kinds of environment, in turn. A kind that has failed too often (a
    broken kind) is left out.

    All episodes of a group are played in one kind. A prompt that is issued again is played in the next kind.
    """

    keeps_deadlines = True  # each kind of environment enforces its own deadlines

    def __init__(self, kinds: Mapping[str, GymnasiumEnvironment]) -> None:
        self.kinds = {name: GymnasiumEpisodes(config) for name, config in kinds.items()}
        self.out: dict[str, str] = {}  # broken kind -> the reason
        self.played = Counter[str]()  # kind -> number of its episodes
        self._chosen: dict[tuple[int, int], str] = {}

    async def play(self, episode: Episode) -> Score | None:
        """Play an episode in the kind of environment that was chosen for its prompt. If this kind is broken, the
        episode is unjudged.
        """
        kind = self._choose(episode.prompt.index, episode.attempt)
        self.played[kind] += 1
        try:
            return await self.kinds[kind].play(episode)
        except ConfigError as error:
            self.out.setdefault(kind, str(error))
            if len(self.out) == len(self.kinds):
                raise
            return Score(0.0, str(error), Outcome.UNJUDGED)

    async def close(self) -> None:
        """End the worker processes of all kinds."""
        for kind in self.kinds.values():
            await kind.close()

    def _choose(self, prompt: int, attempt: int) -> str:
        if (prompt, attempt) not in self._chosen:
            kinds = [name for name in self.kinds if name not in self.out]
            self._chosen[prompt, attempt] = kinds[(prompt + attempt) % len(kinds)]
        return self._chosen[prompt, attempt]


@dataclass(slots=True)
class FaultRun:
    """The contents of a run's storage, and the processes that were alive after the run."""

    fates: Counter[str]  # fault -> number of episodes in the counted versions
    endings: list[tuple[int, Trajectory]]  # all trained episodes, each with the index of its prompt
    seconds: float  # time of the counted versions
    discards: Counter[DiscardReason]  # number of discarded groups
    violations: int
    left: list[int]  # processes that were alive after the end
    rotation: KindRotation


def play_run(setup: FaultSetup, versions: int, folder: Path, *, is_faulty: bool) -> FaultRun:
    """Execute a run of `versions` versions, and read its storage."""
    store, kinds = LocalStore(folder), setup.build_kinds(is_faulty=is_faulty)
    rotation = KindRotation(kinds)
    with mark_processes() as list_left:
        asyncio.run(_play_run(setup, versions, store, rotation))
        left = list_left()
    return _read_run(store, versions, rotation, left)


async def _play_run(setup: FaultSetup, versions: int, store: ObjectStore, rotation: KindRotation) -> None:
    pace = setup.generation / TURN_TOKENS
    engine = TimedEngineConfig(
        max_concurrent_requests=2 * setup.processes, median_tokens=TURN_TOKENS, sigma=0.0, seconds_per_token=pace
    )
    pipeline = Pipeline(
        store,
        versions=versions,
        groups=setup.groups,
        group_size=setup.size,
        async_ratio=float(AHEAD),
        slots=2 * setup.processes,
        longest=2 * TURN_TOKENS * setup.turns,
        engine_list=[TimedEngine(engine)],
        train_seconds=0.0,
        choices={"slots": setup.processes},
        environment=rotation,
        environment_ports=build_ports(setup.build_config()),
    )
    try:
        await pipeline.run()
    finally:
        await rotation.close()


def _read_run(store: ObjectStore, versions: int, rotation: KindRotation, left: list[int]) -> FaultRun:
    entries, fates, endings = read(store), Counter[str](), list[tuple[int, Trajectory]]()
    published, discards = dict[int, float](), Counter[DiscardReason]()
    for entry in entries:
        if isinstance(entry.body, BatchCommitted):
            discards.update(discard.reason for discard in entry.body.discards)
        if not isinstance(entry.body, VersionPublished):
            continue
        version, published[entry.body.number] = entry.body.number, entry.at
        if entry.body.batch_entry is None:
            continue
        batch = entries[entry.body.batch_entry].body
        assert isinstance(batch, BatchCommitted)
        for group in TrajectoryBatch.from_bytes(store.get(batch.file.path)).groups():
            endings += [(group.key.prompt, one) for one in group.trajectories]
            if FIRST < version <= versions - AHEAD:
                fates.update(find_fate(one) for one in group.trajectories)
    seconds = published[versions - AHEAD] - published[FIRST]
    return FaultRun(fates, endings, seconds, discards, len(audit(store, deep=True).violations), left, rotation)


def find_fate(episode: Trajectory) -> str:
    """Return the fault that the outcome and the reason of a stored episode name."""
    found = [
        name for name, (outcome, reason) in ENDINGS.items() if episode.outcome is outcome and reason in episode.reason
    ]
    return found[0] if len(found) == 1 else UNEXPLAINED


@contextlib.contextmanager
def mark_processes() -> Iterator[Callable[[], list[int]]]:
    """Mark all processes that are started in the `with` block; yield a function that lists the marked processes that
    are alive.
    """
    mark = os.environ[VARIABLE] = secrets.token_hex(8)

    def list_left() -> list[int]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get(VARIABLE) == mark:
                    found.append(process.pid)
        return found

    try:
        yield list_left
    finally:
        del os.environ[VARIABLE]


def compare_faults(versions: int) -> Iterator[Row]:
    """Compare runs with faults and runs without faults, in turns. In a run without faults, `versions` versions are
    counted.
    """
    setup, sides = FaultSetup(), {False: list[FaultRun](), True: list[FaultRun]()}
    counted = {False: versions, True: round(versions / (1.0 - sum(SHARES.values())))}
    for _ in range(2 if versions > 3 else 1):
        for is_faulty, runs in sides.items():
            with tempfile.TemporaryDirectory(prefix="faults-") as folder:
                planned = FIRST + counted[is_faulty] + AHEAD
                runs.append(play_run(setup, planned, Path(folder), is_faulty=is_faulty))
    yield from build_rows(setup, sides[False], sides[True])


def build_rows(setup: FaultSetup, sound: list[FaultRun], faulty: list[FaultRun]) -> Iterator[Row]:
    """Return the rates of healthy episodes, and their ratios, of runs without and with faults."""
    case = "faulty environments"
    free, fates = (sum((run.fates for run in runs), Counter[str]()) for runs in (sound, faulty))
    free_rate, rate = (
        sum(run.fates[HEALTHY] for run in runs) / sum(run.seconds for run in runs) for runs in (sound, faulty)
    )
    share, bound = fates[HEALTHY] / sum(fates.values()), setup.find_bound(fates)
    ideal = setup.processes / (setup.turns * (setup.generation + setup.step))
    yield Row(case, "no faults: healthy episodes counted", free[HEALTHY])
    yield Row(case, "no faults: healthy episodes/s", free_rate)
    yield Row(case, "no faults: over worker processes / seconds of an episode", free_rate / ideal)
    for name in ENDINGS:
        yield Row(case, f"with faults: episodes, {name or 'healthy'}", fates[name])
    yield Row(case, "with faults: healthy episodes/s", rate)
    yield at_least(case, "with faults over the healthy share without faults", rate / (share * free_rate), AIM)
    yield Row(case, "bound of it, by the seconds of crashes and deadlines", bound)
    yield Row(case, "with faults over without", rate / free_rate)
    yield from build_checks(case, sound + faulty, faulty)


def build_checks(case: str, runs: list[FaultRun], faulty: list[FaultRun]) -> Iterator[Row]:
    """Return the counts that do not depend on the speed of the machine."""
    endings = [one for run in runs for _, one in run.endings]
    unexplained = sum(find_fate(one) == UNEXPLAINED for one in endings)
    others = sum(n for run in runs for reason, n in run.discards.items() if reason is not DiscardReason.UNJUDGED)
    yield Row(case, "episodes in storage", len(endings))
    yield at_most(case, "episodes without the outcome and the reason of a fault", unexplained, 0)
    yield Row(case, "groups discarded as unjudged", sum(run.discards[DiscardReason.UNJUDGED] for run in runs))
    yield at_most(case, "groups discarded for another reason", others, 0)
    yield at_most(case, "violations of the audit", sum(run.violations for run in runs), 0)
    yield at_most(case, "processes left running", sum(len(run.left) for run in runs), 0)
    left_out = sum("broken" in run.rotation.out for run in faulty)
    yield at_least(case, "runs that left the broken kind out", left_out, len(faulty))
    played = sum(run.rotation.played["broken"] for run in faulty) / len(faulty)
    yield Row(case, "episodes of the broken kind, in a run", played)
