"""The whole control path in one process: scheduler, proxy, controller, channel, stores; timed engines and learner."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollflow.storage.channel import Channel
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.policies import Manifest, PolicyStore, Retention
from rollflow.storage.records import Prompt
from rollflow.storage.trajectories import StagedBatch, TrajectoryStore, commit_path
from rollflow.tasks.engines.base import Engine
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.rewards.pool import ScoreRequest
from rollflow.tasks.rewards.verifier import Score
from rollflow.tasks.rollout.controller import AsyncController, Hooks
from rollflow.tasks.rollout.proxy import InferenceProxy, Probe
from rollflow.tasks.rollout.scheduler import Beginning, Outside, Plan, RolloutScheduler
from rollflow.tasks.settings import TimedEngineConfig


@dataclass
class Pipeline:
    """One run on timed parts. `store` survives it, so that another pipeline can continue."""

    store: MemoryStore
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
    engine_list: Sequence[Engine] | None = None
    scheduler: RolloutScheduler = field(init=False)

    def describe(self) -> None:
        """Write `run.json` once."""
        config = {"async_ratio": self.async_ratio, "store": {"keep_last": 5, "keep_every": 10}}
        if not self.store.exists("run.json"):
            self.store.put("run.json", json.dumps({"run_id": "test", "config": config}).encode())

    async def run(self) -> None:
        """Train up to `versions`."""
        self.describe()
        self.policies = PolicyStore(self.store, Retention())
        self.batches = TrajectoryStore(self.store)
        if self.policies.latest() < 0:
            self._publish(0)
        number = self.batches.next_number()
        beginning = Beginning.after(self.batches.record(number - 1)) if number else Beginning()
        engines = self.engine_list or [self._engine() for _ in range(self.engines)]
        for engine in engines:
            await engine.start()
        self.proxy = InferenceProxy(engines, self.slots)
        refill = lambda n: self.batches.read(n)[1] if self.batches.committed(n) else None  # noqa: E731
        self.channel: Channel[object] = Channel(int(self.async_ratio) + 1, refill, self.policies.latest())
        self.channel._refill = refill
        plan = Plan(self.seed, self.versions, self.groups, self.group_size, self.async_ratio, self.depth, 50, 64, 1.0)
        outside = Outside(prompt_at, self._score, self._commit)
        self.scheduler = RolloutScheduler(plan, outside, self.proxy, beginning)
        hooks = Hooks(lambda _: self.scheduler.wake(), self._pinned)
        controller = AsyncController(self.proxy, self, self.in_flight, hooks)  # type: ignore[arg-type]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(controller.run(self.versions))
            tasks.create_task(self.scheduler.run())
            tasks.create_task(self._learn())

    def _engine(self) -> Engine:
        return TimedEngine(TimedEngineConfig(slots=self.slots, sigma=self.sigma, max_new_tokens=64))

    async def newer(self, version: int) -> int:
        """`VersionFeed`."""
        while (newest := await self.channel.wait_version(version, 1.0)) <= version:
            pass
        return newest

    async def fetch(self, version: int) -> tuple[Path, Probe]:
        """`VersionFeed`."""
        return Path(), Probe((), (), 0.1)

    async def _pinned(self, version: int) -> None:
        pass

    async def _score(self, request: ScoreRequest) -> Score:
        await asyncio.sleep(self.reward_seconds)
        return Score(float(sum(request.tokens) % 2), "parity")

    async def _commit(self, staged: StagedBatch) -> None:
        _, data = self.batches.commit(staged, self.async_ratio)
        await self.channel.put(staged.number, data, 1e6)

    async def _learn(self) -> None:
        version = self.policies.latest()
        draw = random.Random(self.seed)
        while version < self.versions:
            while not self.batches.committed(version):
                await asyncio.sleep(0.01)
            await asyncio.sleep(self.train_seconds * draw.uniform(0.5, 1.5))
            version += 1
            self._publish(version)
            await self.channel.ack(version - 1)
            await self.channel.announce(version)

    def _publish(self, version: int) -> None:
        weights = self.policies.stage(version, {"weights/model.safetensors": f"weights {version}".encode()})
        manifest = Manifest(version, None, weights, (), None)
        if version:
            commit = self.batches.record(version - 1)
            manifest = Manifest(
                version,
                self.policies.manifest_sha256(version - 1),
                weights,
                (),
                hashlib.sha256(self.store.get(commit_path(version - 1))).hexdigest(),
                commit.groups,
                commit.discards,
                commit.cursor,
            )
        self.policies.publish(manifest)


def prompt_at(index: int) -> Prompt:
    """A made-up prompt."""
    return Prompt(f"p{index}", index, "test", f"question {index}", (1, 2, 3 + index % 7), {"answer": "1"})
