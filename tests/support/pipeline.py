"""Runs scheduler, proxy, weight sync, channel and log of a run in one process, with timed engines.

The scheduler, the learner and the channel each have their own view of the log, as separate processes would.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from safetensors.numpy import save

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.channel import Channel
from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.log.entries import BatchVoided, VersionPublished, entry_path
from rollflow.storage.log.run_log import Log, Writer
from rollflow.storage.log.state import CommittedBatch, RunState
from rollflow.storage.model_input import ModelInput
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.policies import PolicyStore
from rollflow.storage.records import Prompt, StoredObject
from rollflow.storage.run_records.episode_restarts import EpisodeRestart, store_restarts
from rollflow.storage.run_records.finished_turns import Record, encode_turns, turns_path
from rollflow.storage.token_arrays import ANY_TOKEN
from rollflow.storage.trajectories import StagedBatch, TrajectoryStore
from rollflow.tasks.engines.base import Engine
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.environments.base import Environment
from rollflow.tasks.environments.ports import NO_PORTS, EnvironmentPorts
from rollflow.tasks.environments.single_turn import SINGLE_TURN
from rollflow.tasks.rollout.config import SNAPSHOT_BYTES, DurableTurns, RolloutConfig, Routing
from rollflow.tasks.rollout.evaluation import Evaluations
from rollflow.tasks.rollout.limits import RolloutLimits
from rollflow.tasks.rollout.proxy import InferenceProxy, WeightsProbe
from rollflow.tasks.rollout.resuming.files import TurnFiles
from rollflow.tasks.rollout.resuming.journal import TurnJournal
from rollflow.tasks.rollout.resuming.resume_point import ResumePoint
from rollflow.tasks.rollout.scheduler import RolloutScheduler, SchedulerPorts
from rollflow.tasks.rollout.weight_sync import VersionCallbacks, WeightSync
from rollflow.tasks.runtime.spans import Spans
from rollflow.tasks.scorers.base import Score, ScoreRequest
from tests.support.described import describe
from tests.support.log_runs import read

LOOK_SECONDS = 0.2  # interval at which a scheduler checks whether a batch was voided (revoked)
PATIENCE_SECONDS = 1e6
STUCK_SECONDS = 1e3

Damage = Literal["flipped", "cut", "gone", "not finite"]  # "not finite": the file is intact, but useless to the learner


class StoredBatches:
    """Implements `Source` from the log, without threads."""

    def __init__(self, batches: TrajectoryStore) -> None:
        self.batches = batches

    async def entry(self, number: int) -> int | None:
        """Return the entry of a batch."""
        waiting = self.batches.find_waiting(number)
        return None if waiting is None else waiting.entry

    async def read(self, number: int) -> object:
        """Read a batch."""
        waiting = self.batches.find_waiting(number)
        if waiting is None:
            raise Missing(f"batch {number} is no longer waiting")
        return self.batches.read(waiting.file)


class InstantTurnFiles(TurnFiles):
    """Files of finished turns that are written without threads, which a virtual clock does not wait for."""

    async def write(self, records: Sequence[Record]) -> str:
        path = turns_path(self._claim, next(self._numbers))
        self._store.create(path, encode_turns(records))
        return path

    async def note(self, restarts: Sequence[EpisodeRestart]) -> None:
        store_restarts(self._store, self._claim, next(self._notes), restarts)

    async def delete(self, path: str) -> None:
        self._store.delete(path)


@dataclass
class Pipeline:
    """One run with timed parts. The `store` outlives the pipeline, so that another pipeline can continue the run."""

    store: ObjectStore
    versions: int = 6
    groups: int = 4
    group_size: int = 2
    async_ratio: float = 1.0
    max_inflight_groups: int = 64
    slots: int = 8
    longest: int = 64  # largest number of tokens of a response, including those of its environment
    engines: int = 1
    train_seconds: float = 0.3
    reward_seconds: float = 0.01
    in_flight: str = "continue"
    seed: int = 0
    sigma: float = 1.0
    seconds_per_token: float = 0.002
    keep_last: int = 5
    engine_list: Sequence[Engine] | None = None
    damage: Mapping[tuple[int, int], Damage] = field(default_factory=dict)  # (batch, number of earlier voids) -> damage
    # (seconds, place of the engine); a new engine replaces the dead one
    engine_deaths: Sequence[tuple[float, int]] = ()
    shares: tuple[float, ...] = (1.0,)
    proxy_type: type[InferenceProxy] = InferenceProxy
    scheduler_type: Callable[..., RolloutScheduler] = RolloutScheduler
    choices: Mapping[str, Any] = field(default_factory=dict)  # fields of `RolloutLimits`
    routing: Routing = "least-work"
    environment: Environment = SINGLE_TURN
    environment_ports: EnvironmentPorts = NO_PORTS
    durable_turns: DurableTurns = "off"
    max_snapshot_bytes: int = SNAPSHOT_BYTES
    vocabulary: int = ANY_TOKEN
    evaluating: Callable[[Pipeline], Evaluations] | None = None
    spans: Spans = field(default_factory=Spans)
    scheduler: RolloutScheduler = field(init=False)

    def describe(self) -> None:
        """Create the run, once."""
        config = {"async_ratio": self.async_ratio, "store": {"keep_last": self.keep_last, "keep_every": 10}}
        rollout = RolloutConfig(redundant_responses=self.choices.get("redundant_responses", 0))
        config |= {"group_size": self.group_size, "rollout": rollout.model_dump(mode="json")}
        if not self.store.exists(entry_path(0)):
            describe(self.store, config=config, sources=len(self.shares))

    @property
    def state(self) -> RunState:
        """The current state of the log."""
        self.log.follow()
        return self.log.state

    async def run(self) -> None:
        """Train until version `versions` is published."""
        self._open()
        if self.policies.newest() < 0:
            self._publish(0, None)
        engines = self.engine_list or [self._engine() for _ in range(self.engines)]
        for engine in engines:
            await engine.start()
        patience = PATIENCE_SECONDS if self.engine_deaths else 0.0
        self.proxy = self.proxy_type(engines, self.slots, patience, self.routing)
        source = StoredBatches(TrajectoryStore(Log(self.store)))
        self.channel: Channel[object] = Channel(int(self.async_ratio) + 1, source, self.policies.newest())
        self.scheduler = self._scheduler()
        evaluations = self.evaluating(self) if self.evaluating else None

        def published(version: int) -> None:
            self.scheduler.note_published(version)
            if evaluations:
                evaluations.note_published(version)

        hooks = VersionCallbacks(published, lambda _: self.scheduler.wake())
        sync = WeightSync(self.proxy, self, self.in_flight, hooks)  # type: ignore[arg-type]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sync.run(self.versions))
            if evaluations:
                tasks.create_task(evaluations.run())
            scheduling = tasks.create_task(self._schedule())
            killing = tasks.create_task(self._kill_engines(engines))
            await self._learn()
            scheduling.cancel()
            killing.cancel()

    def _open(self) -> None:
        """Claim every role of the run."""
        self.describe()
        self.log = Log(self.store)
        self.log.claim("supervisor")
        self.policies, self.batches = PolicyStore(self.log), TrajectoryStore(self.log)
        self.learning = self.log.claim("learner")
        self.scheduling: Writer = Log(self.store).claim("scheduler")

    def _beginning(self) -> ResumePoint:
        self.scheduling.log.follow()
        return ResumePoint.of_state(self.scheduling.log.state)

    def _engine(self) -> Engine:
        pace = self.seconds_per_token
        return TimedEngine(
            TimedEngineConfig(
                max_concurrent_requests=self.slots, sigma=self.sigma, max_new_tokens=64, seconds_per_token=pace
            )
        )

    def _scheduler(self) -> RolloutScheduler:
        limits = RolloutLimits(
            seed=self.seed,
            batches=self.versions,
            groups=self.groups,
            group_size=self.group_size,
            async_ratio=self.async_ratio,
            max_inflight_groups=self.max_inflight_groups,
            attempts=50,
            max_new_tokens=self.longest,
            temperature=1.0,
            shares=self.shares,
            **self.choices,
        )
        ports = SchedulerPorts(
            self._prompt,
            self._score,
            self._commit,
            environment=self.environment,
            environment_ports=self.environment_ports,
            vocabulary=self.vocabulary,
            spans=self.spans,
            journal=self._journal(),
        )
        return self.scheduler_type(limits, ports, self.proxy, self._beginning())

    def _journal(self) -> TurnJournal:
        self.scheduling.log.follow()
        files = InstantTurnFiles(self.store, self.scheduling.claim)
        settings = RolloutConfig(durable_turns=self.durable_turns, max_snapshot_bytes=self.max_snapshot_bytes)
        return files.open_journal(settings, self.scheduling.log.state)

    def _prompt(self, index: int) -> Prompt:
        return replace(prompt_at(index), domain=f"source {index % len(self.shares)}")

    async def _schedule(self) -> None:
        """Form batches; after a batch was voided, start again from the log."""
        clock = asyncio.get_running_loop().time
        while True:
            moved, batch = clock(), -1
            async with asyncio.TaskGroup() as tasks:
                forming = tasks.create_task(self.scheduler.run())
                while self.state.voids == self.scheduler.voids:
                    await asyncio.sleep(LOOK_SECONDS)
                    moved, batch = clock() if self.scheduler.number > batch else moved, self.scheduler.number
                    assert clock() - moved < STUCK_SECONDS, f"no batch after {batch}"
                forming.cancel()
            self.scheduler = self._scheduler()

    async def _kill_engines(self, engines: Sequence[Engine]) -> None:
        living, began = list(engines), asyncio.get_running_loop().time()
        for at, which in sorted(self.engine_deaths):
            await asyncio.sleep(max(0.0, began + at - asyncio.get_running_loop().time()))
            victim, place = living[which % len(living)], which % len(living)
            assert isinstance(victim, TimedEngine)
            victim.kill("killed by the test")
            living[place] = self._engine()
            # This task is shielded, because evaluations may still need it after the run's end.
            await asyncio.shield(asyncio.ensure_future(self._replace(place, living[place])))

    async def _replace(self, place: int, engine: Engine) -> None:
        await engine.start()
        await asyncio.sleep(0.1)
        await self.proxy.join(place, engine)

    async def newer(self, version: int) -> int:
        """Wait for a newer version, as `VersionFeed` says."""
        while (newest := await self.channel.wait_version(version, 1.0)) <= version:
            pass
        return newest

    async def fetch(self, version: int) -> tuple[Path, WeightsProbe]:
        """Fetch a version, as `VersionFeed` says."""
        return Path(), WeightsProbe((), (), 0.1)

    async def _score(self, request: ScoreRequest) -> Score:
        await asyncio.sleep(self.reward_seconds)
        return Score(float(sum(request.tokens) % 2), "parity")

    async def _commit(self, staged: StagedBatch) -> None:
        entry, committed = TrajectoryStore(self.scheduling.log).commit(self.scheduling, staged)
        data = pa.py_buffer(committed.read_bytes()) if isinstance(committed, Path) else committed
        if (harm := self._harm(staged.number)) and harm != "not finite":
            damaged(self.store, self.batches.read_commit(entry.n).file, harm)
        await self.channel.put(staged.number, data, PATIENCE_SECONDS, entry.n)

    async def _learn(self) -> None:
        version = self.policies.newest()
        draw = random.Random(self.seed)
        while version < self.versions:
            batch = await self._next_batch(version)
            await asyncio.sleep(self.train_seconds * draw.uniform(0.5, 1.5))
            version += 1
            self._publish(version, batch)
            await self.channel.ack(version - 1)
            await self.channel.announce(version)

    async def _next_batch(self, number: int) -> CommittedBatch:
        """Read batch `number` from the log; void a damaged or non-finite batch, and wait for its replacement."""
        while True:
            try:
                leased = await self.channel.lease(number, PATIENCE_SECONDS)
                waiting = self.batches.find_waiting(number)
                assert waiting is not None, "the channel handed out what was voided"
                stored = self.batches.read(waiting.file)
            except Corrupt as error:
                self.batches.void(self.learning, number, str(error))
            else:
                assert leased == stored, "the channel handed out something else than what was committed"
                if is_finite(stored) and self._harm(number) != "not finite":
                    return waiting
                self.batches.reject(self.learning, number, waiting.entry, "it is not finite")

    def _harm(self, number: int) -> Damage | None:
        """Return the damage of the current attempt at batch `number`."""
        return self.damage.get((number, voids_of(self.store, number))) if self.damage else None

    def _publish(self, version: int, batch: CommittedBatch | None) -> None:
        files = {
            name: save({"number": np.array([float(version)])})
            for name in ("weights/model.safetensors", "learner/state.safetensors")
        }
        weights, state = ((stored,) for stored in self.policies.stage(self.learning, version, files))
        entry = None if batch is None else batch.entry
        metrics = {} if batch is None else self._count_left_out(batch)
        self.policies.publish(self.learning, VersionPublished(version, entry, weights, state, metrics=metrics))
        self.policies.prune(self.learning)

    def _count_left_out(self, batch: CommittedBatch) -> dict[str, float]:
        """Return the metric of a learner that leaves out unjudged responses."""
        read = TrajectoryBatch.from_bytes(self.batches.read(batch.file))
        left_out = read.episodes - read.judged.episodes
        return {"left_out_responses": float(left_out)} if left_out else {}


def is_finite(stored: pa.Buffer) -> bool:
    """Return whether all log-probs of a batch are finite."""
    rows = TrajectoryBatch.from_bytes(stored).table["logprobs"].to_pylist()
    return all(math.isfinite(value) for row in rows for value in row)


def voids_of(store: ObjectStore, number: int) -> int:
    """Count how often batch `number` was voided."""
    return sum(isinstance(entry.body, BatchVoided) and entry.body.number == number for entry in read(store))


def damaged(store: ObjectStore, file: StoredObject, how: Damage) -> None:
    """Damage a committed batch, as a disk, a user or another program might do."""
    data = store.get(file.path)
    if how == "gone":
        store.delete(file.path)
    elif how == "cut":
        store.put(file.path, data[: len(data) // 2])
    else:
        store.put(file.path, data[:99] + bytes([data[99] ^ 1]) + data[100:])


def prompt_at(index: int) -> Prompt:
    """Build an artificial prompt."""
    return Prompt(
        f"p{index}", index, "test", f"question {index}", ModelInput.of((1, 2, 3 + index % 7)), {"answer": "1"}
    )
