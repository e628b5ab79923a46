"""Defines the rollout stage's Ray actor, which runs the scheduler, the proxy, weight updates and evaluations.

    channel <-- commit <-- scheduler --> proxy --> engine actors
       |                      |                        ^     |
       +--> newer version --> weight sync -> update ---+     | a borrowed engine, or a separate one
                                 |                           v
                                 +--------------------> evaluations --> storage

During an evaluation, its engine serves nothing else. The engine is borrowed from the run, or serves only evaluations.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray

from rollflow.storage.errors import EngineFailed, StoreFailed, Unreachable
from rollflow.storage.log.run_log import Writer
from rollflow.storage.run_records.updates import Update, store_update
from rollflow.storage.trajectories import StagedBatch
from rollflow.tasks.actors.channel import RayChannel
from rollflow.tasks.actors.engine_client import RayEngine
from rollflow.tasks.actors.environment_hosts.owner import open_environments
from rollflow.tasks.actors.gauges import Gauges
from rollflow.tasks.actors.lease import Lease
from rollflow.tasks.actors.placement import actor_options
from rollflow.tasks.actors.reward import RewardClient
from rollflow.tasks.actors.run_engines import EVALUATION, engine_name
from rollflow.tasks.actors.statuses import RolloutStatus
from rollflow.tasks.actors.store_feed import NEWS_SECONDS, StoreFeed
from rollflow.tasks.engines.base import Engine
from rollflow.tasks.engines.meter import EngineStats, measure_prefix_hits, sum_drafts
from rollflow.tasks.policies.vocabulary import read_vocabulary
from rollflow.tasks.prompts.run_prompts import RunPrompts
from rollflow.tasks.rollout.counts import SchedulerCounts
from rollflow.tasks.rollout.evaluation import (
    Evaluation,
    EvaluationPorts,
    Evaluations,
    EvaluationSkipped,
    Evaluator,
    is_evaluated,
    store_evaluation,
    store_skipped,
)
from rollflow.tasks.rollout.judging import judge_repeatedly
from rollflow.tasks.rollout.proxy import InferenceProxy
from rollflow.tasks.rollout.resuming.files import TurnFiles
from rollflow.tasks.rollout.resuming.resume_point import ResumePoint
from rollflow.tasks.rollout.scheduler import RolloutScheduler, SchedulerPorts
from rollflow.tasks.rollout.weight_sync import VersionCallbacks, WeightSync
from rollflow.tasks.run.context import RunContext, claim
from rollflow.tasks.run.episode_ports import build_ports
from rollflow.tasks.run.limits import build_cache_limits, build_limits
from rollflow.tasks.runtime.actor_warnings import warnings_of
from rollflow.tasks.runtime.async_once import AsyncOnce
from rollflow.tasks.runtime.causes import find_first_cause
from rollflow.tasks.runtime.cpu import CpuClock
from rollflow.tasks.runtime.gc_tuning import spare_collector
from rollflow.tasks.runtime.spans import Spans, open_spans
from rollflow.tasks.scorers.base import Score, ScoreRequest

ROLLOUT = "rollout"
STATS_SECONDS = 2.0
PUT_SECONDS = 10.0


def start_rollout(context: RunContext, address: str) -> Any:
    """Start the run's rollout actor on the Ray cluster at `address`, or find the actor if it is running."""
    options = {"name": ROLLOUT, "lifetime": "detached", "get_if_exists": True, "max_concurrency": 256}
    options |= actor_options(context.config, "scheduler", 1.0, imports="rollout")
    return ray.remote(RolloutActor).options(**options).remote(context, address, Lease.of(context))


class RolloutActor:
    """Ray actor that generates the trajectories of one run and evaluates the run's policy versions."""

    writer: Writer
    feed: StoreFeed
    prompts: RunPrompts
    reward: RewardClient
    proxy: InferenceProxy
    scheduler: RolloutScheduler
    evaluations: Evaluations

    def __init__(self, context: RunContext, address: str, lease: Lease | None = None) -> None:
        """Create the actor without reading storage, so that `status` can report that the actor waits for storage.

        Args:
            address: the address of the Ray cluster on which the actor runs.
        """
        if lease:
            lease.hold(ROLLOUT)
        self.context, self._address = context, address
        self.channel = RayChannel()
        self.counts = SchedulerCounts()
        self._gauges = Gauges(ROLLOUT, context.uri)
        self._evaluating = asyncio.Event()  # set once the engine that runs only evaluations has started
        self._own: RayEngine | None = None  # the engine that runs only evaluations, if the run has one
        self._judged = 0  # number of responses of evaluations that were scored
        self.began: float | None = None
        self._notes: set[asyncio.Task[None]] = set()
        self._paused = 0.0  # seconds of weight updates that are already recorded in storage
        self._stats: dict[int, EngineStats] = {}
        self._running: asyncio.Task[None] | None = None
        self._prepared = asyncio.Event()
        self._read = AsyncOnce[RunPrompts](lambda: asyncio.to_thread(context.prompts))
        self._committing: asyncio.Future[Any] | None = None
        self._cpu, self._spans = CpuClock("scheduler"), Spans()

    async def begin(self) -> None:
        """Read the prompts before any engine is ready, because this takes most of the actor's start."""
        await self._read.get()

    def _prepare(self) -> None:
        """Register this process as the run's rollout actor, and create the proxy, scheduler and evaluations."""
        self.writer = claim(self.context, "scheduler", self._address)
        self.config = self.context.config_under(self.writer.claim)
        self.feed = StoreFeed(self.context, self.channel)
        self.patience = self.config.rollout.patience_seconds
        tracking = self.config.tracking
        self._spans = open_spans(tracking.spans, tracking.spans_share, self.context.key, self.context.run_id, ROLLOUT)
        self.reward = RewardClient(self.patience)
        # The inference proxy starts without engines; each engine joins as soon as it is ready.
        slots, cache = self.config.engine.max_concurrent_requests, build_cache_limits(self.config)
        self.proxy = InferenceProxy([], slots, self.patience, self.config.rollout.routing, cache)
        self._environments = open_environments(self.context, self.config)
        self._turn_files = TurnFiles(self.context.store, self.writer.claim)
        self.scheduler = self._create_scheduler()
        self.evaluations = self._create_evaluations()

    def _create_scheduler(self) -> RolloutScheduler:
        """Create a rollout scheduler that starts from the state in the run's log."""
        self.feed.ask()
        resume = ResumePoint.of_state(self.context.log.state)
        self._environment = self._environments.build(self.config.environment)
        ports = SchedulerPorts(
            self.prompts.request,
            self.reward.score,
            self._commit,
            environment=self._environment,
            environment_ports=build_ports(self.config, self.context.tokenizer),
            vocabulary=read_vocabulary(self.context.policy_folder),
            spans=self._spans,
            start_epoch=self._start_epoch,
            journal=self._turn_files.open_journal(
                self.config.rollout, self.context.log.state, has_turns=self._environment.has_turns
            ),
        )
        scheduler = RolloutScheduler(build_limits(self.config), ports, self.proxy, resume)
        scheduler.counts = self.counts
        return scheduler

    def _create_evaluations(self) -> Evaluations:
        settings, longest = self.config.evaluation, self.config.engine.max_new_tokens
        environment = self._environments.build(self.config.environment)
        held, vocabulary = self.prompts.held_out(), read_vocabulary(self.context.policy_folder)
        means = EvaluationPorts(
            wanted=self.context.evaluates,
            evaluated=lambda version: asyncio.to_thread(is_evaluated, self.context.store, version),
            engine=self.proxy.borrow_engine
            if self.config.evaluation_engine(on_cpu=True) is None
            else self._borrow_own_engine,
            fetch=self.feed.fetch_kept,
            evaluator=Evaluator(
                held,
                settings.samples,
                settings.temperature,
                longest,
                self._score,
                environment,
                vocabulary,
                build_ports(self.config, self.context.tokenizer),
                self.config.accuracy_shares,
                by_value=settings.correct == "value",
                sets=self.prompts.evaluation_sets(),
            ),
            keep=lambda found: asyncio.to_thread(self._store_result, found),
            slots=self.config.engine.max_concurrent_requests,
            tries=max(1, self.config.recovery.restarts),
        )
        return Evaluations(means, self.config.versions)

    async def run(self) -> None:
        """Form all batches and evaluate policy versions, until the last version is loaded and evaluated.

        A second call of `run`, from a restarted Prefect flow, waits for the same work.
        """
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        await asyncio.shield(self._running)

    async def _run(self) -> None:
        self.prompts = await self._read.get()
        await asyncio.to_thread(self._prepare)
        spare_collector()
        self._prepared.set()
        hooks = VersionCallbacks(self._note_published, self._note_updated)
        sync = WeightSync(self.proxy, self.feed, self.config.engine.on_weight_update, hooks)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(sync.run(self.config.versions))
                tasks.create_task(self._schedule())
                tasks.create_task(self.evaluations.run())
            await asyncio.gather(*self._notes)
            await asyncio.to_thread(self._spans.flush)
        except BaseExceptionGroup as failed:  # raise the cause itself, because a user reads the first line of the error
            raise find_first_cause(failed) from None
        finally:
            await self._environments.close_all()

    async def _schedule(self) -> None:
        """Form batches until the last policy version is trained, with a new scheduler after each rejected batch."""
        while True:
            forming = asyncio.create_task(self.scheduler.run())
            try:
                if await self._wait_trained(forming, self.scheduler.voids):
                    return
            finally:
                forming.cancel()
                await asyncio.wait([forming, *([self._committing] if self._committing else [])])
                await self._environments.close(self._environment)
            self.scheduler = await asyncio.to_thread(self._create_scheduler)

    async def _wait_trained(self, forming: asyncio.Task[None], voided: int) -> bool:
        """Return True once all policy versions are trained, or False as soon as another batch is rejected."""
        while self.feed.newest < self.config.versions:
            if forming.done():
                forming.result()
                await asyncio.sleep(NEWS_SECONDS)
            else:
                await asyncio.wait([forming], timeout=NEWS_SECONDS)
            await asyncio.to_thread(self.writer.check)
            self.feed.newest = self.context.log.state.version
            if self.context.log.state.voids > voided:
                return False
        return True

    async def join(self, number: int) -> None:
        """Add the started engine `number`, which may replace a dead engine; return when it serves requests."""
        await self._prepared.wait()
        engine = RayEngine(ray.get_actor(engine_name(number)), name=engine_name(number), keep_actor=True)
        present = self._own if number == EVALUATION else self.proxy.engines.get(number)
        if isinstance(present, RayEngine) and present.actor == engine.actor and await present.owns():
            return
        if number == EVALUATION:
            self._own = engine
            self._evaluating.set()
        else:
            await self.proxy.join(number, engine)

    async def status(self) -> RolloutStatus:
        """Return the rollout actor's status without waiting for storage."""
        waits = self.context.store.waits
        if not self._prepared.is_set():
            attended = self._running is not None
            return RolloutStatus(
                waits_for=waits or ("" if attended else "the first engine"),
                costs=self._cpu.read(),
                warned=warnings_of(ROLLOUT).read(),
                attended=attended,
            )
        counts = self.counts
        lasted = max(time.monotonic() - self.began, 1e-9) if self.began else math.inf
        idle = await self._measure_idle()  # also updates `self._stats`
        status = RolloutStatus(
            waits_for=waits or ("" if self.feed.newest >= 0 else "the first policy version, from the train stage"),
            costs=[*self._cpu.read(), *(cost for stats in self._stats.values() for cost in stats.costs)],
            idle=idle,
            warned=[*warnings_of(ROLLOUT).read(), *(w for stats in self._stats.values() for w in stats.warned)],
            version=self.proxy.version,
            batch=self.scheduler.number,
            running=self.scheduler.running,
            buffered=len(self.scheduler.buffer),
            waiting=max(0, self.scheduler.number - max(self.feed.newest, 0)),
            tokens=counts.tokens,
            trajectories=counts.trajectories,
            discards=dict(counts.discards),
            filtered=dict(counts.filtered),
            wasted_tokens=counts.discarded_tokens + counts.surplus_tokens,
            held=counts.held.seconds / lasted,
            waited=counts.waited.seconds / lasted,
            unscored=self.scheduler.scoring.waiting,
            backlogged=counts.backlogged.seconds / lasted,
            dropped=counts.dropped_tokens / max(counts.tokens, 1),
            prefix_hits=measure_prefix_hits(self._stats.values()),
            drafts=sum_drafts(self._stats.values()),
            restarted=self.proxy.restarted,
            update_seconds=self.proxy.update_seconds,
            failed=self._find_failed(),
            evaluations_due=self.evaluations.due,
            judged=self._judged,
            environments=self._environments.read(),
        )
        return self._gauges.show(status)

    def _find_failed(self) -> dict[int, str]:
        """Return the reason why each failed engine failed, keyed by the engine's number."""
        failed = dict(self.proxy.failed)
        try:
            if self._own is not None:
                self._own.check()
        except EngineFailed as error:
            failed[EVALUATION] = str(error)
        return failed

    def _note_published(self, version: int) -> None:
        self.scheduler.note_published(version)
        self.evaluations.note_published(version)

    def _note_updated(self, version: int) -> None:
        self.began = self.began or time.monotonic()
        update = Update(version, self.proxy.update_seconds - self._paused, time.time())
        self._paused = self.proxy.update_seconds
        self._spans.record_version(version, "load weights", update.pause_seconds)
        self.scheduler.wake()
        note = asyncio.create_task(asyncio.to_thread(self._store_update, update))
        self._notes.add(note)
        note.add_done_callback(self._notes.discard)

    def _store_update(self, update: Update) -> None:
        with contextlib.suppress(Unreachable, StoreFailed):  # the run continues without this record of a weight update
            store_update(self.context.store, update)

    @contextlib.asynccontextmanager
    async def _borrow_own_engine(self) -> AsyncIterator[Engine]:
        """Wait until the engine that runs only evaluations is alive, and lend it to an evaluation."""
        while self._own is None or EVALUATION in self._find_failed():
            self._evaluating.clear()
            await self._evaluating.wait()
        yield self._own

    async def _score(self, request: ScoreRequest) -> Score:
        """Score a response of an evaluation, with the same time limits for every policy version."""
        tries = build_limits(self.config).judge_tries(request.scorer)
        score = await judge_repeatedly(self.reward.score, tries)(replace(request, adapts=False))
        self._judged += 1
        return score

    def _store_result(self, found: Evaluation | EvaluationSkipped) -> None:
        if isinstance(found, EvaluationSkipped):
            store_skipped(self.context.store, found)
        else:
            store_evaluation(self.context.store, found)

    async def _start_epoch(self, source: int, position: int) -> int:
        assert self.prompts.epochs is not None, "the run exists"
        return await asyncio.to_thread(self.prompts.epochs.start, self.writer, source, position)

    async def _commit(self, staged: StagedBatch) -> None:
        """Write a batch to storage and to the log, then put it into the channel for the learner."""
        # Writing a batch to the log is not cancelled halfway, because a new scheduler must find the batch in the log.
        self._committing = asyncio.ensure_future(asyncio.to_thread(self.context.batches.commit, self.writer, staged))
        entry, payload = await asyncio.shield(self._committing)
        await self._hand_over(staged.number, payload, entry.n)

    async def _hand_over(self, number: int, payload: Path | pa.Buffer, entry: int) -> None:
        """Put a batch into the channel; wait at most `patience` seconds until the channel has room.

        The wait excludes the time in which storage does not answer.
        """
        waited, why = 0.0, ""
        while waited < self.patience:
            try:
                return await self.channel.put(number, payload, PUT_SECONDS, entry)
            except (TimeoutError, Unreachable) as error:
                why = str(error)
            await asyncio.to_thread(self.feed.ask)  # returns once storage answers
            waited += PUT_SECONDS
        raise Unreachable(
            f"the learner took no batch for {self.patience:g} s (rollout.patience_seconds); the last try to give "
            f"it one failed: {why}"
        )

    async def _measure_idle(self) -> float:
        """Compute the share of the time since generation began in which the engines were idle."""
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
