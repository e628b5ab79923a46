"""The rollout stage's actor: scheduler, proxy and controller of one run, on one event loop.

channel <-- commit <-- scheduler --> proxy --> engine actors
   |                      |                        ^
   +--> newer version --> controller --> update ---+
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from typing import Any

import ray

from rollflow.storage.errors import Unreachable
from rollflow.storage.ray_channel import RayChannel
from rollflow.storage.trajectories import StagedBatch, TrajectoryStore
from rollflow.storage.updates import Update, store_update
from rollflow.tasks.engines import build_engine
from rollflow.tasks.engines.actor import EngineActor, RayEngine
from rollflow.tasks.engines.base import Engine
from rollflow.tasks.engines.meter import EngineStats
from rollflow.tasks.rewards.actor import RewardClient
from rollflow.tasks.rollout.controller import AsyncController, Hooks
from rollflow.tasks.rollout.evaluation import Evaluator, store_evaluation
from rollflow.tasks.rollout.plan import plan_of
from rollflow.tasks.rollout.proxy import InferenceProxy, Probe
from rollflow.tasks.rollout.scheduler import Beginning, Counts, Outside, RolloutScheduler
from rollflow.tasks.run import RunContext

ROLLOUT = "rollout"
NEWS_SECONDS = 2.0  # how long the channel's news is waited for before storage is asked
STATS_SECONDS = 2.0


class StoreFeed:
    """`VersionFeed` from the policy store; the channel only says when to look."""

    def __init__(self, context: RunContext, channel: RayChannel) -> None:
        self._context, self._channel = context, channel
        self._policies = context.policies()
        self._tokens = context.probe_tokens
        self.newest = -1  # as last seen

    def ask(self) -> int:
        """The newest published version; asks the store."""
        self.newest = self._policies.latest(max(self.newest, 0))
        return self.newest

    async def newer(self, version: int) -> int:
        """See `VersionFeed`."""
        while True:
            with contextlib.suppress(Unreachable):  # a channel that is being replaced; storage knows as well
                await self._channel.wait_version(version, NEWS_SECONDS)
            newest = await asyncio.to_thread(self.ask)
            if newest > version:
                return newest

    async def fetch(self, version: int) -> tuple[RunContext, Probe]:
        """See `VersionFeed`. The engines fetch the weights themselves, each on its node."""
        manifest = await asyncio.to_thread(self._policies.manifest, version)
        return self._context, Probe(self._tokens, manifest.probe, self._context.config.engine.probe_tolerance)


def first_cause(failed: BaseExceptionGroup[Any]) -> BaseException:
    """The first error inside nested groups: what a person should read."""
    inner = failed.exceptions[0]
    return first_cause(inner) if isinstance(inner, BaseExceptionGroup) else inner


def start_engine(context: RunContext, number: int, gpus: float) -> Any:
    """Start one of the run's engine actors (or find it), with its share of the cluster's GPUs."""
    options = {"lifetime": "detached", "get_if_exists": True, "num_gpus": gpus, "max_concurrency": 1024}
    # Over the nodes in turn: one that is lost takes few engines with it. Ray draws a node at random for an actor that
    # asks for nothing, whatever the strategy.
    spread = {"scheduling_strategy": "SPREAD", "num_cpus": 0.001}
    remote = ray.remote(EngineActor).options(name=engine_name(number), **spread, **options)
    return remote.remote(functools.partial(build_engine_of, context))


def build_engine_of(context: RunContext) -> Engine:
    """An engine of the run, on this node and not started yet."""
    return build_engine(context.config.engine, context.policy_folder, dtype=context.config.policy.dtype)


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
        self.feed = StoreFeed(context, self.channel)
        self.order = context.order()
        self.patience = self.config.rollout.patience_seconds
        self.reward = RewardClient(self.patience)
        # Engines join as they get ready: none is waited for while another could work.
        self.proxy = InferenceProxy([], self.config.engine.slots, self.patience, self.config.rollout.routing)
        self.counts = Counts()
        self.scheduler = self._scheduler()
        self.evaluator = self._evaluator()
        self.began: float | None = None
        self._update: Update
        self._paused = 0.0  # update seconds that are written down
        self._stats: dict[int, EngineStats] = {}
        self._running: asyncio.Task[None] | None = None
        self._committing: asyncio.Future[Any] | None = None

    def _scheduler(self) -> RolloutScheduler:
        """A scheduler that begins where storage says."""
        beginning = Beginning.of(self.batches, self.feed.ask())
        outside = Outside(self.order.prompt, self.reward.score, self._commit)
        scheduler = RolloutScheduler(plan_of(self.config), outside, self.proxy, beginning)
        scheduler.counts = self.counts
        return scheduler

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
        """Form every batch and follow every version; returns when the last version was loaded and evaluated.

        A second call (of a stage flow that took over from a dead one) joins the first.
        """
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        await asyncio.shield(self._running)

    async def _run(self) -> None:
        hooks = Hooks(lambda version: self.scheduler.published(version), self._updated, self._pinned)
        controller = AsyncController(self.proxy, self.feed, self.config.engine.in_flight, hooks)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(controller.run(self.config.versions))
                tasks.create_task(self._schedule())
        except BaseExceptionGroup as failed:  # a person reads the first line: it must be the cause
            raise first_cause(failed) from None

    async def _schedule(self) -> None:
        """Form batches until the last is trained; when one is voided, begin again from storage."""
        while True:
            forming = asyncio.create_task(self.scheduler.run())
            try:
                if await self._trained(forming, self.scheduler.voids):
                    return
            finally:
                forming.cancel()
                await asyncio.wait([forming, *([self._committing] if self._committing else [])])
            self.scheduler = await asyncio.to_thread(self._scheduler)

    async def _trained(self, forming: asyncio.Task[None], voided: int) -> bool:
        """Wait until every version is trained (True) or another batch is voided (False)."""
        while self.feed.newest < self.config.versions:
            if forming.done():
                forming.result()
                await asyncio.sleep(NEWS_SECONDS)
            else:
                await asyncio.wait([forming], timeout=NEWS_SECONDS)
            if await asyncio.to_thread(self.batches.voided) > voided:
                return False
        return True

    async def join(self, number: int) -> None:
        """Take engine `number`, which has started, in the place of one that died; returns when it serves."""
        engine = RayEngine(ray.get_actor(engine_name(number)), name=engine_name(number), keep_actor=True)
        present = self.proxy.engines.get(number)
        if isinstance(present, RayEngine) and present.actor == engine.actor and await present.owns():
            return
        await self.proxy.join(number, engine)

    async def status(self) -> dict[str, Any]:
        """What the stage's flow and the live view show. It waits for nobody."""
        counts = self.counts
        recent = counts.recent_rewards
        return {
            "version": self.proxy.version,
            "waits_for": "" if self.feed.newest >= 0 else "the first policy version, from the train stage",
            "batch": self.scheduler.number,
            "running": self.scheduler.running,
            "buffered": len(self.scheduler.buffer),
            "waiting": max(0, self.scheduler.number - max(self.feed.newest, 0)),
            "tokens": counts.tokens,
            "trajectories": counts.trajectories,
            "reward": sum(recent) / len(recent) if recent else None,
            "discards": dict(counts.discards),
            "filtered": dict(counts.filtered),
            "wasted_tokens": counts.discarded_tokens + counts.surplus_tokens,
            "held": counts.held_seconds / max(time.monotonic() - self.began, 1e-9) if self.began else 0.0,
            "restarted": self.proxy.restarted,
            "update_seconds": self.proxy.update_seconds,
            "seconds": time.monotonic() - self.began if self.began else 0.0,
            "idle": await self._idle(),
            "failed": dict(self.proxy.failed),
        }

    def _updated(self, version: int) -> None:
        self.began = self.began or time.monotonic()
        self._update = Update(version, self.proxy.update_seconds - self._paused, time.time())
        self._paused = self.proxy.update_seconds
        self.scheduler.wake()

    async def _pinned(self, version: int) -> None:
        await asyncio.to_thread(store_update, self.context.store, self._update)
        every = self.config.evaluation.every
        if version in (0, self.config.versions) or (every and version % every == 0):
            evaluation = await self.evaluator.run(self.proxy, version)
            await asyncio.to_thread(store_evaluation, self.context.store, evaluation)

    async def _commit(self, staged: StagedBatch) -> None:
        """Make a batch durable, then hand it to the learner."""
        # Shielded: a scheduler that begins again must not overlook a commit that is still being written.
        self._committing = asyncio.ensure_future(
            asyncio.to_thread(self.batches.commit, staged, self.config.async_ratio)
        )
        record, data = await asyncio.shield(self._committing)
        payload = self.context.store.local_path(record.file) or data
        try:
            await self.channel.put(staged.number, payload, self.patience, staged.edition)
        except TimeoutError as error:
            raise Unreachable(f"the learner took no batch for {self.patience:g} s ({error})") from None

    async def _idle(self) -> float:
        """Share of the time since generation began in which the engines had nothing to run."""
        if self.began is None:
            return 0.0
        engines = {number: engine for number, engine in self.proxy.engines.items() if isinstance(engine, RayEngine)}
        asked = {number: asyncio.create_task(engine.stats()) for number, engine in engines.items()}
        if asked:
            await asyncio.wait(asked.values(), timeout=STATS_SECONDS)
        for number, one in asked.items():
            if one.done() and not one.cancelled() and one.exception() is None:
                self._stats[number] = one.result()
            one.cancel()
        lasted = time.monotonic() - self.began
        return max(
            0.0, 1.0 - sum(s.busy_seconds for s in self._stats.values()) / (lasted * self.config.engine.replicas)
        )
