"""The rollout stage's actor: scheduler, proxy and controller of one run, on one event loop.

channel <-- commit <-- scheduler --> proxy --> engine actors
   |                      |                        ^
   +--> newer version --> controller --> update ---+
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from rollflow.storage.errors import RollflowError, Unreachable
from rollflow.storage.ray_channel import RayChannel
from rollflow.storage.trajectories import StagedBatch, TrajectoryStore
from rollflow.tasks.engines.actor import EngineActor, RayEngine
from rollflow.tasks.rewards.actor import REWARD, RewardClient
from rollflow.tasks.rollout.controller import AsyncController, Hooks
from rollflow.tasks.rollout.evaluation import Evaluation, Evaluator, store_evaluation
from rollflow.tasks.rollout.proxy import InferenceProxy, Probe
from rollflow.tasks.rollout.scheduler import Beginning, Outside, Plan, RolloutScheduler
from rollflow.tasks.run import RunContext
from rollflow.tasks.settings import RunConfig

ROLLOUT = "rollout"
NEWS_SECONDS = 2.0  # how long the channel's news is waited for before storage is asked


class StoreFeed:
    """`VersionFeed` from the policy store; the channel only says when to look."""

    def __init__(self, context: RunContext, channel: RayChannel) -> None:
        self._context, self._channel = context, channel
        self._policies = context.policies()
        self._tokens = context.probe_tokens

    async def newer(self, version: int) -> int:
        """See `VersionFeed`."""
        while True:
            await self._channel.wait_version(version, NEWS_SECONDS)
            newest = await asyncio.to_thread(self._policies.latest, max(version, 0))
            if newest > version:
                return newest

    async def fetch(self, version: int) -> tuple[Path, Probe]:
        """See `VersionFeed`."""
        manifest = await asyncio.to_thread(self._policies.manifest, version)
        weights = await asyncio.to_thread(self._policies.weights_folder, manifest, self._context.cache / "weights")
        return weights, Probe(self._tokens, manifest.probe, self._context.config.engine.probe_tolerance)


def first_cause(failed: BaseExceptionGroup[Any]) -> BaseException:
    """The first error inside nested groups: what a person should read."""
    inner = failed.exceptions[0]
    return first_cause(inner) if isinstance(inner, BaseExceptionGroup) else inner


def plan_of(config: RunConfig) -> Plan:
    """The scheduler's numbers from the config."""
    engine = config.engine
    return Plan(
        seed=config.seed,
        batches=config.versions,
        groups=config.groups,
        group_size=config.group_size,
        async_ratio=config.async_ratio,
        depth=config.rollout.depth or max(1, -(-engine.slots * engine.replicas // config.group_size)),
        attempts=config.rollout.attempts,
        max_new_tokens=engine.max_new_tokens,
        temperature=engine.temperature,
    )


def start_engines(context: RunContext, gpus: float) -> list[Any]:
    """Start the run's engine actors (or find them), each with its share of the cluster's GPUs."""
    config, folder = context.config, context.policy_folder
    options = {"lifetime": "detached", "get_if_exists": True, "num_cpus": 0, "num_gpus": gpus, "max_concurrency": 1024}
    return [
        ray.remote(EngineActor)
        .options(name=engine_name(i), **options)
        .remote(config.engine, folder, config.policy.dtype)
        for i in range(config.engine.replicas)
    ]


def engine_name(number: int) -> str:
    """The name of an engine's actor."""
    return f"engine-{number}"


def start_rollout(context: RunContext) -> Any:
    """Start the run's rollout actor (or find it, after a restart of its flow)."""
    options = {"name": ROLLOUT, "lifetime": "detached", "get_if_exists": True, "num_cpus": 0, "max_concurrency": 256}
    return ray.remote(RolloutActor).options(**options).remote(context)


class RolloutActor:
    """Runs the rollout side of one run. See the module's docstring."""

    def __init__(self, context: RunContext) -> None:
        self.context, self.config = context, context.config
        self.channel = RayChannel()
        self.batches = TrajectoryStore(context.store)
        self.order = context.order()
        self.reward = RewardClient(ray.get_actor(REWARD), self.config.rollout.patience_seconds)
        engines = [
            RayEngine(ray.get_actor(engine_name(i)), name=engine_name(i)) for i in range(self.config.engine.replicas)
        ]
        self.engines = engines
        self.proxy = InferenceProxy(engines, self.config.engine.slots)
        self.scheduler = RolloutScheduler(plan_of(self.config), self._outside(), self.proxy, self._beginning())
        self.evaluator = self._evaluator()
        self.began: float | None = None
        self._engine_stats: list[dict[str, float]] = []

    def _outside(self) -> Outside:
        return Outside(self.order.prompt, self.reward.score, self._commit)

    def _beginning(self) -> Beginning:
        number = self.batches.next_number()
        return Beginning.after(self.batches.record(number - 1)) if number else Beginning()

    def _evaluator(self) -> Evaluator:
        settings = self.config.evaluation
        return Evaluator(
            prompts=self.order.held_out(),
            samples=settings.samples,
            temperature=settings.temperature,
            max_new_tokens=self.config.engine.max_new_tokens,
            score=self.reward.score,
        )

    async def run(self) -> None:
        """Form every batch and follow every version; returns when the last version was loaded and evaluated."""
        controller = AsyncController(
            self.proxy,
            StoreFeed(self.context, self.channel),
            self.config.engine.in_flight,
            Hooks(self._updated, self._pinned),
        )
        reason: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(controller.run(self.config.versions))
                tasks.create_task(self.scheduler.run())
        except* RollflowError as failed:
            reason = first_cause(failed)
        if reason is not None:
            raise reason

    async def status(self) -> dict[str, Any]:
        """What the stage's flow and the live view show."""
        counts = self.scheduler.counts
        recent = counts.recent_rewards
        return {
            "version": self.proxy.version,
            "waits_for": "" if self.proxy.version >= 0 else "the first policy version, from the train stage",
            "batch": self.scheduler.number,
            "running": self.scheduler.running,
            "buffered": len(self.scheduler.buffer),
            "waiting": await self.channel.waiting(),
            "tokens": counts.tokens,
            "trajectories": counts.trajectories,
            "reward": sum(recent) / len(recent) if recent else None,
            "discards": dict(counts.discards),
            "restarted": self.proxy.restarted,
            "update_seconds": self.proxy.update_seconds,
            "seconds": time.monotonic() - self.began if self.began else 0.0,
            "idle": await self._idle(),
            "failures": self.proxy.failures,
        }

    async def evaluate(self, version: int) -> dict[str, Any]:
        """Evaluate the version the engines hold now (the last one, after training)."""
        return asdict(await self._evaluate(version))

    def _updated(self, version: int) -> None:
        self.began = self.began or time.monotonic()
        self.scheduler.wake()

    async def _pinned(self, version: int) -> None:
        every = self.config.evaluation.every
        if version in (0, self.config.versions) or (every and version % every == 0):
            await self._evaluate(version)

    async def _evaluate(self, version: int) -> Evaluation:
        evaluation = await self.evaluator.run(self.proxy, version)
        await asyncio.to_thread(store_evaluation, self.context.store, evaluation)
        return evaluation

    async def _commit(self, staged: StagedBatch) -> None:
        """Make a batch durable, then hand it to the learner."""
        _, data = await asyncio.to_thread(self.batches.commit, staged, self.config.async_ratio)
        patience = self.config.rollout.patience_seconds
        try:
            await self.channel.put(staged.number, data, patience)
        except TimeoutError as error:
            raise Unreachable(f"the learner took no batch for {patience:g} s ({error})") from None

    async def _idle(self) -> float:
        """Share of the time since generation began in which the engines had nothing to run."""
        if self.began is None:
            return 0.0
        stats = await asyncio.gather(*(engine.stats() for engine in self.engines))
        lasted = time.monotonic() - self.began
        return max(0.0, 1.0 - sum(s.busy_seconds for s in stats) / (lasted * len(stats)))
