"""Runs one random schedule cheaply: with rollflow's scheduler, proxy, controller and log, with timed parts, and with a
ledger that checks each commit.

There are no batch files, no Arrow and no audit, so a schedule takes some ten milliseconds and thousands can be drawn.
To stop a process, its tasks are cancelled; the next process reads the log, claims the scheduler's role and continues.

Most times are multiples of a tenth of a second, so that many events happen at the same moment, in an arbitrary order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from rollflow.storage.errors import EngineFailed
from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import GroupKey, Prompt, StopReason, TrajectoryGroup
from rollflow.storage.trajectories import StagedBatch
from rollflow.tasks.engines.base import Generation, GenerationRequest, InFlight
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.environments.single_turn import SINGLE_TURN
from rollflow.tasks.prompts.config import FilePrompts
from rollflow.tasks.prompts.epochs import Epochs
from rollflow.tasks.rollout.cache_queue import CacheLimits
from rollflow.tasks.rollout.config import FilterConfig, Routing
from rollflow.tasks.rollout.limits import RolloutLimits
from rollflow.tasks.rollout.proxy import InferenceProxy, WeightsProbe
from rollflow.tasks.rollout.resuming.resume_point import ResumePoint
from rollflow.tasks.rollout.scheduler import RolloutScheduler, SchedulerPorts
from rollflow.tasks.rollout.weight_sync import VersionCallbacks, WeightSync
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import Score, ScoreRequest
from tests.support.epoch_rules import Questions
from tests.support.ledger import Ledger

SOON = 1e-3
MAX_NEW_TOKENS = 8
NO_PROBE = WeightsProbe((), (), 0.1)
FILTERS = {
    "none": None,
    "above 0": FilterConfig(min_mean=0.0),
    "below 1": FilterConfig(max_mean=1.0),
    "spread": FilterConfig(min_std=0.0),
}


class Trouble(NamedTuple):
    """A failure in which an engine is killed, or is replaced while it lives. After `down` seconds, another engine joins
    in its place.
    """

    at: float
    which: int
    what: Literal["kill", "replace"]
    down: float


class Stop(NamedTuple):
    """A stop of the process after some seconds, followed by voids (revocations) of a number of untrained batches."""

    after: float
    voids: int


@dataclass(frozen=True)
class Case:
    """All random choices of one schedule; the defaults are the simplest."""

    async_ratio: float = 0.0
    groups: int = 1
    group_size: int = 1
    slots: int = 1
    speeds: tuple[float, ...] = (1.0,)
    batches: int = 4
    max_inflight_groups: int = 64
    max_unscored: int | None = None
    limited: bool = False  # whether groups start only if slots are free
    routing: Routing = "least-work"
    redundant_groups: int = 0
    redundant_responses: int = 0
    tail_batching: bool = False
    max_preemptions: int | None = None
    max_batches_ahead: float = 1.0  # the key's value as a share of alpha
    on_stale: Literal["drop", "wait"] = "drop"
    batch_order: Literal["finished", "started"] = "finished"
    staleness_from: Literal["started", "oldest-token"] = "started"
    filter: str = "none"
    in_flight: InFlight = "continue"
    shares: tuple[float, ...] = (1.0,)
    questions: tuple[int, ...] = ()  # number of questions of each source that skips solved questions; 0: no skips
    solved_every: int = 3
    sigma: float = 1.0
    slowing: float = 0.0
    train_seconds: tuple[float, ...] = (0.3,)
    reward_seconds: tuple[float, ...] = (0.0,)
    prompt_seconds: tuple[float, ...] = (0.0,)
    update_seconds: float = 0.0
    fetch_seconds: float = 0.0
    commit_seconds: float = 0.0
    latency: float = 0.0  # seconds of delay for a call to an engine, and for the answer
    patience: float = 1e6  # seconds that requests wait for an engine to join if no engine is left
    trouble: tuple[Trouble, ...] = ()
    stops: tuple[Stop, ...] = ()
    attempts: int = 10**6
    turns: int = 1
    kv_tokens: int | None = None  # tokens of an engine's KV cache, which limit the admitted episodes
    seed: int = 0

    @property
    def sources(self) -> list[FilePrompts]:
        """The prompt sources. A source with a number of questions skips solved questions."""
        every = [self.solved_every if questions else 1 for questions in self.questions]
        return [FilePrompts(path=f"{which}.jsonl", solved_every=one) for which, one in enumerate(every)]

    @property
    def limits(self) -> RolloutLimits:
        """The scheduler's limits."""
        return RolloutLimits(
            seed=self.seed,
            batches=self.batches,
            groups=self.groups,
            group_size=self.group_size,
            async_ratio=self.async_ratio,
            max_inflight_groups=self.max_inflight_groups,
            max_unscored=self.max_unscored,
            attempts=self.attempts,
            max_new_tokens=MAX_NEW_TOKENS,
            temperature=1.0,
            slots=self.slots * len(self.speeds) if self.limited else None,
            redundant_groups=self.redundant_groups,
            redundant_responses=self.redundant_responses,
            tail_batching=self.tail_batching,
            max_preemptions=self.max_preemptions,
            max_batches_ahead=self.max_batches_ahead * self.async_ratio,
            on_stale=self.on_stale,
            batch_order=self.batch_order,
            staleness_from=self.staleness_from,
            filter=FILTERS[self.filter],
            shares=self.shares,
        )

    def engine(self, place: int) -> TimedEngineConfig:
        """Create the engine with this index."""
        return TimedEngineConfig(
            max_concurrent_requests=self.slots,
            max_new_tokens=MAX_NEW_TOKENS,
            median_tokens=3,
            sigma=self.sigma,
            seconds_per_token=0.1,
            update_seconds=self.update_seconds,
            batch_slowdown=self.slowing,
            speed=self.speeds[place],
        )


class Talk(Environment):
    """An environment of `turns` turns, with a tenth of a second between two turns."""

    def __init__(self, turns: int) -> None:
        self._turns = turns

    async def play(self, episode: Episode) -> Score | None:
        made = await episode.generate(max_tokens=MAX_NEW_TOKENS // self._turns)
        for _ in range(1, self._turns):
            await asyncio.sleep(0.1)
            made = None if made is None else await episode.generate(max_tokens=MAX_NEW_TOKENS // self._turns)
        return None if made is None else await episode.judge(episode.response)


class Watched(TimedEngine):
    """A timed engine with slow calls; it rejects more requests than slots, and reports each request's first arrival."""

    def __init__(self, config: TimedEngineConfig, latency: float, first: Callable[[str, int], bool]) -> None:
        super().__init__(config)
        self._slots, self._latency, self._first = config.max_concurrent_requests, latency, first
        self._now = 0

    async def generate(self, request: GenerationRequest) -> Generation:
        self._now += 1
        assert self._now <= self._slots, "more requests than slots"
        assert self.version >= 0
        clock = asyncio.get_running_loop().time
        began, useful = clock(), bool(request.prefix) or self._first(request.id, self.version)
        try:
            made = await super().generate(request)
            in_vain = not useful and made.ending is not StopReason.ABORTED
            assert not in_vain or clock() < began + self._latency + SOON, "made for no batch, and nobody stopped it"
            await self._wait()
            return made
        finally:
            self._now -= 1

    async def abort(self, ids: Sequence[str]) -> None:
        await self._wait()
        await super().abort(ids)

    async def suspend(self, in_flight: InFlight) -> None:
        await self._wait()
        await super().suspend(in_flight)

    async def resume(self) -> None:
        await self._wait()
        await super().resume()

    async def _wait(self) -> None:
        if self._latency:
            await asyncio.sleep(self._latency)
            self.check()


@dataclass
class Life:
    """One process, which works from the newest commit to the last version, or until it is cancelled."""

    case: Case
    ledger: Ledger
    engines: dict[int, Watched] = field(default_factory=dict)

    async def run(self) -> None:
        """Train all remaining versions."""
        case = self.case
        self.engines = {place: self._engine(place) for place in range(len(case.speeds))}
        cache = None if case.kv_tokens is None else CacheLimits(case.kv_tokens)
        self.proxy = InferenceProxy(list(self.engines.values()), case.slots, case.patience, case.routing, cache)
        talk = SINGLE_TURN if case.turns == 1 and cache is None else Talk(case.turns)
        start = self._start_epoch
        ports = SchedulerPorts(self._request_prompt, self._score, self._commit, _as_it_is, talk, start_epoch=start)
        self.writer = self.ledger.scheduling()
        self.epochs = Epochs(self.writer.log, case.sources, [Questions(count, case.seed) for count in case.questions])
        self.scheduler = RolloutScheduler(case.limits, ports, self.proxy, ResumePoint.of_state(self.writer.log.state))
        hooks = VersionCallbacks(self.scheduler.note_published, lambda _: self.scheduler.wake())
        sync = WeightSync(self.proxy, self, case.in_flight, hooks)
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [sync.run(case.batches), self.scheduler.run(), *map(self._trouble, case.trouble)]
                running = [tasks.create_task(one) for one in beside]
                await self._learn()
                for task in running:
                    task.cancel()
        finally:
            lanes = self.proxy._queue.places.values()
            assert self.proxy.running == 0
            assert all(lane.taken == 0 for lane in lanes), "a slot is held for nobody"

    async def _commit(self, staged: StagedBatch) -> None:
        scheduler, order = self.scheduler, self.scheduler._order
        scored = [one.rank.key for one in scheduler.buffer._groups]
        held = [*scheduler._running, *scored, *order._again, *order._left, *order._tail]
        await self.ledger.commit(self.writer, staged, held)

    async def _start_epoch(self, source: int, position: int) -> int:
        await asyncio.sleep(self.case.commit_seconds)
        end = self.epochs.start(self.writer, source, position)
        await asyncio.sleep(self.case.commit_seconds)
        return end

    async def _learn(self) -> None:
        ledger, seconds = self.ledger, self.case.train_seconds
        while ledger.version < self.case.batches:
            await ledger.batch(ledger.version)
            await asyncio.sleep(seconds[ledger.version % len(seconds)])
            ledger.publish(ledger.version + 1)

    def _engine(self, place: int) -> Watched:
        return Watched(self.case.engine(place), self.case.latency, self._first)

    def _first(self, id: str, version: int) -> bool:
        """Record that a response starts or restarts, and check that a batch can still use this response."""
        prompt, attempt, sample, *turn = map(int, id.rstrip("'").split("."))
        if turn:  # the first turn has started the response
            return True
        self.ledger.started.setdefault(GroupKey(prompt, attempt), {})[sample] = version
        number = self.scheduler.due.first
        return number >= self.case.batches or version >= number - self.case.async_ratio

    def _request_prompt(self, index: int) -> Prompt | Awaitable[Prompt]:
        seconds = self.case.prompt_seconds[index % len(self.case.prompt_seconds)]
        return self._find_prompt(index, seconds) if seconds else self._prompt(index)

    async def _find_prompt(self, index: int, seconds: float) -> Prompt:
        await asyncio.sleep(seconds)
        return self._prompt(index)

    def _prompt(self, index: int) -> Prompt:
        position, source = divmod(index, len(self.case.shares))
        self.epochs.locate(source, position)
        return Prompt(f"p{index}", index, "", "", ModelInput.of((index,)))

    async def _score(self, request: ScoreRequest) -> Score:
        number = sum(request.tokens)
        if seconds := self.case.reward_seconds[number % len(self.case.reward_seconds)]:
            await asyncio.sleep(seconds)
        return Score(float(number % 3 > 0), "")

    async def _trouble(self, trouble: Trouble) -> None:
        await asyncio.sleep(trouble.at)
        place = trouble.which % len(self.engines)
        if trouble.what == "kill":
            self.engines[place].kill()
            await asyncio.sleep(trouble.down)
        while True:
            self.engines[place] = engine = self._engine(place)
            try:
                return await self.proxy.join(place, engine)
            except EngineFailed:  # the engine was killed before it served requests
                await asyncio.sleep(0.1)

    async def newer(self, version: int) -> int:
        """Wait for a newer version, as `VersionFeed` says."""
        await self.ledger.until(lambda: self.ledger.version > version)
        return self.ledger.version

    async def fetch(self, version: int) -> tuple[Path, WeightsProbe]:
        """Fetch a version, as `VersionFeed` says."""
        await asyncio.sleep(self.case.fetch_seconds)
        return Path(), NO_PROBE


def _as_it_is(group: TrajectoryGroup) -> TrajectoryGroup:
    return group


def ran(case: Case) -> Ledger:
    """Run a schedule from beginning to end, through all its stops, and return the ledger."""

    async def main() -> Ledger:
        ledger = Ledger(case)
        try:
            for stop in case.stops:
                await stopped(Life(case, ledger), stop)
            await Life(case, ledger).run()
            assert sorted(ledger.batches) == list(range(case.batches))
            ledger.check_end()
        finally:
            ledger.close()
        return ledger

    try:
        return run_virtual(main())
    except BaseExceptionGroup as group:
        raise _innermost(group) from None


async def stopped(life: Life, stop: Stop) -> None:
    """Run a process for a while, then void batches."""
    task = asyncio.create_task(life.run())
    await asyncio.wait([task], timeout=stop.after)
    task.cancel()
    [outcome] = await asyncio.gather(task, return_exceptions=True)
    if outcome is not None and not isinstance(outcome, asyncio.CancelledError):
        raise outcome
    life.ledger.void(stop.voids)


def _innermost(error: BaseException) -> BaseException:
    """Return the innermost first error, so that Hypothesis does not mix up different bugs when it shrinks a case."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
