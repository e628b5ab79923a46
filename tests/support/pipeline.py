"""The whole control path in one process: scheduler, proxy, controller, channel, stores; timed engines and learner."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rollflow.storage.channel import Channel, Source
from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.log.entries import entry_path
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.policies import Manifest, PolicyStore, Retention
from rollflow.storage.records import Prompt
from rollflow.storage.trajectories import BatchCommit, StagedBatch, TrajectoryStore
from rollflow.tasks.engines.base import Engine
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.rewards.pool import ScoreRequest
from rollflow.tasks.rewards.verifier import Score
from rollflow.tasks.rollout.controller import AsyncController, Hooks
from rollflow.tasks.rollout.evaluation import Evaluations
from rollflow.tasks.rollout.plan import Plan
from rollflow.tasks.rollout.proxy import InferenceProxy, Probe
from rollflow.tasks.rollout.scheduler import Beginning, Outside, RolloutScheduler
from rollflow.tasks.settings import Routing, TimedEngineConfig
from tests.support.described import describe

LOOK_SECONDS = 0.2  # how often a scheduler asks whether a batch was voided
PATIENCE_SECONDS = 1e6
STUCK_SECONDS = 1e3

Damage = Literal["flipped", "cut", "gone", "commit"]


class StoredBatches:
    """`Source` from the trajectory store, without threads."""

    def __init__(self, batches: TrajectoryStore) -> None:
        self.batches = batches

    async def edition(self, number: int) -> int | None:
        """See `Source`."""
        return self.batches.current_edition(number)

    async def read(self, number: int) -> object:
        """See `Source`."""
        return self.batches.read(number)[1]


@dataclass
class Pipeline:
    """One run on timed parts. `store` survives it, so that another pipeline can continue."""

    store: ObjectStore
    versions: int = 6
    groups: int = 4
    group_size: int = 2
    async_ratio: float = 1.0
    depth: int = 64
    slots: int = 8
    engines: int = 1
    train_seconds: float = 0.3
    reward_seconds: float = 0.01
    in_flight: str = "continue"
    seed: int = 0
    sigma: float = 1.0
    seconds_per_token: float = 0.002
    keep_last: int = 5
    engine_list: Sequence[Engine] | None = None
    damage: Mapping[tuple[int, int], Damage] = field(default_factory=dict)  # to (batch, edition), once committed
    engine_deaths: Sequence[tuple[float, int]] = ()  # (seconds, which engine); a new one joins in its place
    shares: tuple[float, ...] = (1.0,)
    scheduler_type: type[RolloutScheduler] = RolloutScheduler
    choices: Mapping[str, Any] = field(default_factory=dict)  # of the `Plan`
    routing: Routing = "least-work"
    evaluating: Callable[[Pipeline], Evaluations] | None = None
    scheduler: RolloutScheduler = field(init=False)

    def describe(self) -> None:
        """Create the run once."""
        config = {"async_ratio": self.async_ratio, "store": {"keep_last": self.keep_last, "keep_every": 10}}
        if not self.store.exists(entry_path(0)):
            describe(self.store, config={**config, "group_size": self.group_size}, sources=len(self.shares))

    async def run(self) -> None:
        """Train up to `versions`."""
        self._open()
        if self._newest() < 0:
            self._publish(0, None)
        engines = self.engine_list or [self._engine() for _ in range(self.engines)]
        for engine in engines:
            await engine.start()
        patience = PATIENCE_SECONDS if self.engine_deaths else 0.0
        self.proxy = InferenceProxy(engines, self.slots, patience, self.routing)
        self.channel: Channel[object] = Channel(int(self.async_ratio) + 1, self._source(), self._newest())
        self.scheduler = self._scheduler()
        evaluations = self.evaluating(self) if self.evaluating else None

        def published(version: int) -> None:
            self.scheduler.published(version)
            if evaluations:
                evaluations.published(version)

        hooks = Hooks(published, lambda _: self.scheduler.wake())
        controller = AsyncController(self.proxy, self, self.in_flight, hooks)  # type: ignore[arg-type]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(controller.run(self.versions))
            if evaluations:
                tasks.create_task(evaluations.run())
            scheduling = tasks.create_task(self._schedule())
            killing = tasks.create_task(self._kill_engines(engines))
            await self._learn()
            scheduling.cancel()
            killing.cancel()

    def _open(self) -> None:
        self.describe()
        self.policies = PolicyStore(self.store, Retention(self.keep_last))
        self.batches = TrajectoryStore(self.store)

    def _newest(self) -> int:
        return self.policies.latest()

    def _source(self) -> Source[object]:
        return StoredBatches(TrajectoryStore(self.store))

    def _beginning(self) -> Beginning:
        return Beginning.of(self.batches, self._newest())

    def _voided(self) -> int:
        return self.batches.voided()

    def _engine(self) -> Engine:
        pace = self.seconds_per_token
        return TimedEngine(
            TimedEngineConfig(slots=self.slots, sigma=self.sigma, max_new_tokens=64, seconds_per_token=pace)
        )

    def _scheduler(self) -> RolloutScheduler:
        plan = Plan(
            seed=self.seed,
            batches=self.versions,
            groups=self.groups,
            group_size=self.group_size,
            async_ratio=self.async_ratio,
            depth=self.depth,
            attempts=50,
            max_new_tokens=64,
            temperature=1.0,
            whole_groups=self.routing == "group",
            shares=self.shares,
            **self.choices,
        )
        outside = Outside(self._prompt, self._score, self._commit)
        return self.scheduler_type(plan, outside, self.proxy, self._beginning())

    def _prompt(self, index: int) -> Prompt:
        return replace(prompt_at(index), domain=f"source {index % len(self.shares)}")

    async def _schedule(self) -> None:
        """Form batches; whenever one is voided, begin again from storage."""
        clock = asyncio.get_running_loop().time
        while True:
            moved, batch = clock(), -1
            async with asyncio.TaskGroup() as tasks:
                forming = tasks.create_task(self.scheduler.run())
                while self._voided() == self.scheduler.voids:
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
            # Shielded: the run may have ended, and evaluations still need it.
            await asyncio.shield(asyncio.ensure_future(self._replace(place, living[place])))

    async def _replace(self, place: int, engine: Engine) -> None:
        await engine.start()
        await asyncio.sleep(0.1)
        await self.proxy.join(place, engine)

    async def newer(self, version: int) -> int:
        """`VersionFeed`."""
        while (newest := await self.channel.wait_version(version, 1.0)) <= version:
            pass
        return newest

    async def fetch(self, version: int) -> tuple[Path, Probe]:
        """`VersionFeed`."""
        return Path(), Probe((), (), 0.1)

    async def _score(self, request: ScoreRequest) -> Score:
        await asyncio.sleep(self.reward_seconds)
        return Score(float(sum(request.tokens) % 2), "parity")

    async def _commit(self, staged: StagedBatch) -> None:
        record, data = self.batches.commit(staged, self.async_ratio)
        if (harm := self.damage.get((record.number, record.edition))) is not None:
            damaged(self.store, record, harm)
        await self.channel.put(record.number, data, PATIENCE_SECONDS, record.edition)

    async def _learn(self) -> None:
        version = self._newest()
        draw = random.Random(self.seed)
        while version < self.versions:
            record = await self._next_batch(version)
            await asyncio.sleep(self.train_seconds * draw.uniform(0.5, 1.5))
            version += 1
            self._publish(version, record)
            await self.channel.ack(version - 1)
            await self.channel.announce(version)

    async def _next_batch(self, number: int) -> Any:
        """Batch `number` as it stands in the store; a damaged one is voided and waited for anew."""
        while True:
            try:
                leased = await self.channel.lease(number, PATIENCE_SECONDS)
                record, stored = self.batches.read(number)
            except Corrupt as error:
                self.batches.void(number, str(error))
            except Missing:
                continue
            else:
                assert leased == stored, "the channel handed out something else than what was committed"
                return record

    def _publish(self, version: int, record: Any) -> None:
        weights = self.policies.stage(version, {"weights/model.safetensors": f"weights {version}".encode()})
        manifest = Manifest(version, None, weights, (), None)
        if record is not None:
            manifest = Manifest(
                version,
                self.policies.manifest_sha256(version - 1),
                weights,
                (),
                self.batches.commit_sha256(version - 1),
                record.groups,
                self.batches.discards(record),
                record.cursor,
            )
        self.policies.publish(manifest)


def damaged(store: ObjectStore, record: BatchCommit, how: Damage) -> None:
    """Damage a committed batch as a disk, a person or another program might."""
    path = record.path if how == "commit" else record.file
    data = store.get(path)
    if how == "gone":
        store.delete(path)
    elif how == "cut":
        store.put(path, data[: len(data) // 2])
    else:
        store.put(path, data[:99] + bytes([data[99] ^ 1]) + data[100:])


def prompt_at(index: int) -> Prompt:
    """A made-up prompt."""
    return Prompt(f"p{index}", index, "test", f"question {index}", (1, 2, 3 + index % 7), {"answer": "1"})
