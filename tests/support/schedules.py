"""One schedule, light: the shipped scheduler, proxy and controller; timed parts; a ledger in memory that checks all.

No files, no Arrow, no audit: some ten milliseconds a schedule, so that thousands can be drawn. A process that stops is
one whose tasks are cancelled; the next one begins from the ledger's newest commit, as `Beginning.of` would have it.

Most times are multiples of a tenth of a second, so that much happens at the same moment, in an order of its own.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from rollflow.storage.errors import EngineFailed
from rollflow.storage.records import Cursor, DiscardReason, Ending, GroupKey, Prompt, Trajectory, TrajectoryGroup
from rollflow.storage.trajectories import StagedBatch
from rollflow.tasks.clock import run_virtual
from rollflow.tasks.engines.base import Generation, GenerationRequest, InFlight
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.rewards.pool import ScoreRequest
from rollflow.tasks.rewards.verifier import Score
from rollflow.tasks.rollout.controller import AsyncController, Hooks
from rollflow.tasks.rollout.plan import Plan
from rollflow.tasks.rollout.proxy import InferenceProxy, Probe
from rollflow.tasks.rollout.scheduler import Beginning, Outside, RolloutScheduler
from rollflow.tasks.settings import FilterConfig, Routing, TimedEngineConfig

SOON = 1e-3
STUCK_SECONDS = 2000.0  # virtual, without a new batch; the longest that a batch may honestly take is far below
MAX_NEW_TOKENS = 8
NO_PROBE = Probe((), (), 0.1)
FILTERS = {
    "none": None,
    "above 0": FilterConfig(min_mean=0.0),
    "below 1": FilterConfig(max_mean=1.0),
    "spread": FilterConfig(min_std=0.0),
}


class Trouble(NamedTuple):
    """An engine is killed, or replaced while it lives; `down` seconds later another one joins in its place."""

    at: float
    which: int
    what: Literal["kill", "replace"]
    down: float


class Stop(NamedTuple):
    """The process stops after some seconds; then so many of the batches that were not trained on are voided."""

    after: float
    voids: int


@dataclass(frozen=True)
class Case:
    """All that is drawn for one schedule; the defaults are the plainest."""

    async_ratio: float = 0.0
    groups: int = 1
    group_size: int = 1
    slots: int = 1
    speeds: tuple[float, ...] = (1.0,)
    batches: int = 4
    depth: int = 64
    limited: bool = False  # groups start only while slots are free
    mode: Literal["queue", "batch"] = "queue"
    routing: Routing = "least-work"
    extra_groups: int = 0
    extra_responses: int = 0
    tail_batching: bool = False
    tail_after: int | None = None
    ahead: float = 1.0  # as a part of alpha
    at_bound: Literal["drop", "wait"] = "drop"
    order: Literal["finished", "started"] = "finished"
    staleness: Literal["started", "oldest-token"] = "started"
    filter: str = "none"
    in_flight: InFlight = "continue"
    shares: tuple[float, ...] = (1.0,)
    sigma: float = 1.0
    slowing: float = 0.0
    train_seconds: tuple[float, ...] = (0.3,)
    reward_seconds: tuple[float, ...] = (0.0,)
    update_seconds: float = 0.0
    fetch_seconds: float = 0.0
    commit_seconds: float = 0.0
    latency: float = 0.0  # of a call to an engine, and of its answer
    patience: float = 1e6  # for an engine to join, when none is left
    trouble: tuple[Trouble, ...] = ()
    stops: tuple[Stop, ...] = ()
    attempts: int = 10**6
    seed: int = 0

    @property
    def plan(self) -> Plan:
        """What the scheduler works to."""
        return Plan(
            seed=self.seed,
            batches=self.batches,
            groups=self.groups,
            group_size=self.group_size,
            async_ratio=self.async_ratio,
            depth=self.depth,
            attempts=self.attempts,
            max_new_tokens=MAX_NEW_TOKENS,
            temperature=1.0,
            slots=self.slots * len(self.speeds) if self.limited else None,
            mode=self.mode,
            extra_groups=self.extra_groups,
            extra_responses=self.extra_responses,
            tail_batching=self.tail_batching,
            tail_after=self.tail_after,
            ahead=self.ahead * self.async_ratio,
            at_bound=self.at_bound,
            order=self.order,
            staleness=self.staleness,
            whole_groups=self.routing == "group",
            filter=FILTERS[self.filter],
            shares=self.shares,
        )

    def engine(self, place: int) -> TimedEngineConfig:
        """An engine for this place."""
        return TimedEngineConfig(
            slots=self.slots,
            max_new_tokens=MAX_NEW_TOKENS,
            median_tokens=3,
            sigma=self.sigma,
            seconds_per_token=0.1,
            update_seconds=self.update_seconds,
            slowing=self.slowing,
            speed=self.speeds[place],
        )


class Ledger:
    """What storage would hold. Each commit is checked against all before it; `newest` versions are published."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.batches: dict[int, StagedBatch] = {}  # by number: the edition that counts
        self.version = 0
        self.cursor = Cursor((0,) * len(case.shares), (0,) * len(case.shares))
        self.open: set[GroupKey] = set()  # dispatches without a fate, as of the newest commit
        self.again: tuple[GroupKey, ...] = ()
        self.behind: tuple[tuple[int, int], ...] = ()
        self.missing: list[tuple[int, int]] = []
        self.started: dict[GroupKey, dict[int, int]] = {}  # version at which each sample reached an engine first
        self.discards: Counter[DiscardReason] = Counter()
        self.slow: Counter[int] = Counter()  # prompt -> times it ran and was left behind
        self.order = 0
        self._next = 0
        self._changed = asyncio.Event()

    @property
    def trained(self) -> list[list[tuple[GroupKey, list[tuple[int, ...]]]]]:
        """What each version was trained on: dispatches, and what was said."""
        batches = (self.batches[number].groups for number in range(self.case.batches))
        return [[(group.key, [t.tokens for t in group.trajectories]) for group in groups] for groups in batches]

    @property
    def expected(self) -> tuple[int, int]:
        """Number and edition of the next commit."""
        return self.missing[0] if self.missing else (self._next, 0)

    def beginning(self) -> Beginning:
        """Where the next scheduler starts."""
        if not self.order:
            return Beginning()
        return Beginning(self._next, self.cursor, self.again, tuple(self.missing), self.order, behind=self.behind)

    async def commit(self, staged: StagedBatch) -> None:
        """Takes a moment; after it the batch is there for ever. Then it waits for room, as in the channel."""
        await asyncio.sleep(self.case.commit_seconds)
        assert (staged.number, staged.edition) == self.expected
        assert staged.order == self.order
        self._check_groups(staged)
        self._check_fates(staged)
        self.batches[staged.number] = staged
        self.cursor, self.again, self.behind = staged.cursor, staged.in_flight, staged.behind
        self.order += 1
        if self.missing:
            self.missing.pop(0)
        else:
            self._next += 1
        self._news()
        await self.until(lambda: staged.number < self.version + int(self.case.async_ratio) + 1)

    def _check_groups(self, staged: StagedBatch) -> None:
        """N groups of G finished responses; each as fresh as alpha asks, by what the engines saw."""
        case = self.case
        assert len(staged.groups) == case.groups
        for group in staged.groups:
            assert len({t.sample for t in group.trajectories}) == len(group.trajectories) == case.group_size
            for trajectory in group.trajectories:
                self._check_trajectory(trajectory, self.started[group.key][trajectory.sample])
                assert staged.number - case.async_ratio <= trajectory.started_version <= self.version, "alpha is broken"

    def _check_trajectory(self, one: Trajectory, started: int) -> None:
        versions = [version for version, mine in zip(one.versions, one.loss_mask, strict=True) if mine]
        assert one.ending in (Ending.STOP, Ending.LENGTH)
        assert versions
        assert versions == sorted(versions)
        assert one.started_version == (min(versions) if self.case.staleness == "oldest-token" else started)
        if self.case.in_flight == "restart":
            assert len(set(versions)) == 1

    def _check_fates(self, staged: StagedBatch) -> None:
        """Since the commit before, every dispatch has come to one fate or is in flight; none came from nowhere."""
        new = {GroupKey(index, 0) for index in staged.cursor.indices() if not self.cursor.covers(index)}
        assert all(a <= b for a, b in zip(self.cursor.issued, staged.cursor.issued, strict=True))
        again = {GroupKey(d.key.prompt, d.key.attempt + 1) for d in staged.discards if d.reason.issued_again}
        ended = [group.key for group in staged.groups] + [discard.key for discard in staged.discards]
        known = self.open | new | again
        assert len(self.open) + len(new) + len(again) == len(known), "an attempt is made twice"
        assert len(set(ended)) == len(ended), "two fates"
        assert set(ended) <= known, "a fate of what was not in flight"
        assert len(set(staged.in_flight)) == len(staged.in_flight), "in flight twice"
        assert set(staged.in_flight) == known - set(ended), "lost, or made up"
        self.open = set(staged.in_flight)
        filtered = Counter(
            d.key.prompt % len(self.case.shares) for d in staged.discards if d.reason is DiscardReason.FILTERED
        )
        before = self.cursor.filtered
        assert staged.cursor.filtered == tuple(count + filtered[source] for source, count in enumerate(before))
        self.discards.update(d.reason for d in staged.discards)
        self.slow.update(d.key.prompt for d in staged.discards if d.slow)
        waiting = {key.prompt for key in staged.in_flight}
        assert dict(staged.behind) == {prompt: n for prompt, n in self.slow.items() if prompt in waiting}

    def void(self, count: int) -> None:
        """So many of the batches that were not trained on are gone; their prompts are issued again."""
        for number in [number for number in sorted(self.batches) if number >= self.version][:count]:
            gone = self.batches.pop(number)
            self.missing.append((number, gone.edition + 1))
            self.again += tuple(GroupKey(group.key.prompt, group.key.attempt + 1) for group in gone.groups)
        self.missing.sort()
        self.open = set(self.again)
        self.behind = tuple((key.prompt, n) for key in self.again if (n := self.slow[key.prompt]))

    async def batch(self, number: int) -> StagedBatch:
        """A batch, once it is there; within bounds."""
        try:
            async with asyncio.timeout(STUCK_SECONDS):
                await self.until(lambda: number in self.batches)
        except TimeoutError:
            raise AssertionError(f"no batch {number} within {STUCK_SECONDS:g} virtual seconds") from None
        return self.batches[number]

    def publish(self, version: int) -> None:
        """A version was trained."""
        self.version = version
        self._news()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a change after which this holds."""
        while not condition():
            await self._changed.wait()

    def _news(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Watched(TimedEngine):
    """A timed engine whose calls take time; it refuses more requests than slots, and tells when they come first."""

    def __init__(self, config: TimedEngineConfig, latency: float, first: Callable[[str, int], bool]) -> None:
        super().__init__(config)
        self._slots, self._latency, self._first = config.slots, latency, first
        self._now = 0

    async def generate(self, request: GenerationRequest) -> Generation:
        self._now += 1
        assert self._now <= self._slots, "more requests than slots"
        assert self.version >= 0
        clock = asyncio.get_running_loop().time
        began, useful = clock(), bool(request.prefix) or self._first(request.id, self.version)
        try:
            made = await super().generate(request)
            in_vain = not useful and made.ending is not Ending.ABORTED
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
    """One process: from the newest commit to the last version, or until it is cancelled."""

    case: Case
    ledger: Ledger
    engines: dict[int, Watched] = field(default_factory=dict)

    async def run(self) -> None:
        """Train all versions that are left."""
        case = self.case
        self.engines = {place: self._engine(place) for place in range(len(case.speeds))}
        self.proxy = InferenceProxy(list(self.engines.values()), case.slots, case.patience, case.routing)
        outside = Outside(self._prompt, self._score, self.ledger.commit, pack=_as_it_is)
        self.scheduler = RolloutScheduler(case.plan, outside, self.proxy, self.ledger.beginning())
        hooks = Hooks(self.scheduler.published, lambda _: self.scheduler.wake())
        controller = AsyncController(self.proxy, self, case.in_flight, hooks)
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [controller.run(case.batches), self.scheduler.run(), *map(self._trouble, case.trouble)]
                running = [tasks.create_task(one) for one in beside]
                await self._learn()
                for task in running:
                    task.cancel()
        finally:
            lanes = self.proxy._lanes.places.values()
            assert self.proxy.running == 0
            assert all(lane.taken == 0 for lane in lanes), "a slot is held for nobody"

    async def _learn(self) -> None:
        ledger, seconds = self.ledger, self.case.train_seconds
        while ledger.version < self.case.batches:
            await ledger.batch(ledger.version)
            await asyncio.sleep(seconds[ledger.version % len(seconds)])
            ledger.publish(ledger.version + 1)

    def _engine(self, place: int) -> Watched:
        return Watched(self.case.engine(place), self.case.latency, self._first)

    def _first(self, id: str, version: int) -> bool:
        """A response begins, or begins anew; whether there will be a batch that is not too new for it."""
        prompt, attempt, sample = map(int, id.rstrip("'").split("."))
        self.ledger.started.setdefault(GroupKey(prompt, attempt), {})[sample] = version
        number = self.scheduler._next[0]
        return number >= self.case.batches or version >= number - self.case.async_ratio

    def _prompt(self, index: int) -> Prompt:
        return Prompt(f"p{index}", index, "", "", (index,))

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
            except EngineFailed:  # it was killed before it served
                await asyncio.sleep(0.1)

    async def newer(self, version: int) -> int:
        """See `VersionFeed`."""
        await self.ledger.until(lambda: self.ledger.version > version)
        return self.ledger.version

    async def fetch(self, version: int) -> tuple[Path, Probe]:
        """See `VersionFeed`."""
        await asyncio.sleep(self.case.fetch_seconds)
        return Path(), NO_PROBE


def _as_it_is(group: TrajectoryGroup) -> TrajectoryGroup:
    return group


def ran(case: Case) -> Ledger:
    """The ledger of a run from its beginning to its end, over all its stops."""

    async def main() -> Ledger:
        ledger = Ledger(case)
        for stop in case.stops:
            life = asyncio.create_task(Life(case, ledger).run())
            await asyncio.wait([life], timeout=stop.after)
            life.cancel()
            [outcome] = await asyncio.gather(life, return_exceptions=True)
            if outcome is not None and not isinstance(outcome, asyncio.CancelledError):
                raise outcome
            ledger.void(stop.voids)
        await Life(case, ledger).run()
        assert sorted(ledger.batches) == list(range(case.batches))
        return ledger

    try:
        return run_virtual(main())
    except BaseExceptionGroup as group:
        raise _innermost(group) from None


def _innermost(error: BaseException) -> BaseException:
    """The first error itself, so that a search for the smallest case tells one bug from another."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
