"""The rollout scheduler: every dispatched prompt ends in exactly one committed fate.

    prompts --admission--> dispatch: G x (generate -> verify) --> buffer --N groups--> commit --> channel
                ^                         |                         |
                |         failed, too slow, not needed              | stale
                +------ issued again <----+-------------------------+
                        (filtered: another prompt instead)

What each loop waits for, and what ends the wait:

- `_admit` waits for room: a new version, a response or a group that ended, a batch that was formed.
- a dispatch waits for its engines and its verifier; both are bounded (a dead engine raises, a verdict has a deadline).
- `_form` waits for N fresh groups, then for the commit and for room in the channel.

A batch is formed as soon as that leaves no group behind, and otherwise when the learner is ready for it. Then a group
that would be too old for the next batch is given up and issued again, unless it is *awaited* (`at_bound = "wait"`, or a
prompt of a long round). See `issue_order` for which prompts go together.

What was issued and what was discarded since the batch before is committed with each batch, taken at one moment of the
event loop; a scheduler that starts from the run's log issues again exactly what is open there. Batches that were voided
are formed again first.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rollflow.storage.batch import packed
from rollflow.storage.errors import RollflowError
from rollflow.storage.log.state import RunState
from rollflow.storage.records import Cursor, Discard, DiscardReason, GroupKey, Prompt, TrajectoryGroup
from rollflow.storage.trajectories import StagedBatch
from rollflow.tasks.rollout.admission import allowance
from rollflow.tasks.rollout.buffer import Rank, TrajectoryBuffer
from rollflow.tasks.rollout.group import GroupPorts, GroupRollout
from rollflow.tasks.rollout.issue_order import IssueOrder
from rollflow.tasks.rollout.limits import RolloutLimits, filtered
from rollflow.tasks.rollout.proxy import InferenceProxy
from rollflow.tasks.rollout.starts import Starts
from rollflow.tasks.verifiers.pool import ScoreRequest
from rollflow.tasks.verifiers.verifier import Score

FIRST = GroupKey(-1, -1)  # before every other


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a scheduler starts: a new run, or what the log says of an old one."""

    number: int = 0  # of the first batch that was never committed
    cursor: Cursor = field(default_factory=Cursor)
    again: tuple[GroupKey, ...] = ()
    missing: tuple[int, ...] = ()  # batches to form again
    voids: int = 0  # that it knows of
    behind: tuple[tuple[int, int], ...] = ()  # prompts of `again` that were left behind, and how often

    @classmethod
    def of_state(cls, state: RunState) -> ResumePoint:
        """Continue a run where its log says it is."""
        return cls(
            number=state.next_batch,
            cursor=state.cursor,
            again=state.in_flight,
            missing=tuple(state.holes),
            voids=state.voids,
            behind=tuple(state.behind.items()),
        )


@dataclass(frozen=True, slots=True)
class SchedulerPorts:
    """What the scheduler calls: prompts, the verifier, the durable commit with the channel behind it.

    `pack` gets a group ready for its batch as soon as it is complete; a simulation has nothing to write.
    """

    prompt: Callable[[int], Prompt]
    score: Callable[[ScoreRequest], Awaitable[Score]]
    commit: Callable[[StagedBatch], Awaitable[None]]
    pack: Callable[[TrajectoryGroup], TrajectoryGroup] = packed


@dataclass(slots=True)
class Stopwatch:
    """How long something was so."""

    seconds: float = 0.0
    since: float | None = None

    def note(self, now: float, *, holds: bool) -> None:
        """It is so from now on, or not."""
        if self.since is not None:
            self.seconds += now - self.since
        self.since = now if holds else None


@dataclass(slots=True)
class Counts:
    """What a scheduler has done since it started."""

    tokens: int = 0
    surplus_tokens: int = 0  # of responses that were started beyond G
    discarded_tokens: int = 0
    dropped_tokens: int = 0  # of these, because it was too slow or not needed
    trajectories: int = 0
    reward_sum: float = 0.0
    discards: Counter[str] = field(default_factory=Counter)
    filtered: Counter[str] = field(default_factory=Counter)  # by what was wrong with the group
    held: Stopwatch = field(default_factory=Stopwatch)  # engines had free slots, and alpha allowed no more to start
    waited: Stopwatch = field(default_factory=Stopwatch)  # the learner was ready, and a full batch waited at the bound
    recent_rewards: deque[float] = field(default_factory=lambda: deque(maxlen=512))


class RolloutScheduler:
    """Takes prompts to committed batches. See the module's docstring for the guarantees."""

    def __init__(
        self, limits: RolloutLimits, ports: SchedulerPorts, proxy: InferenceProxy, resume: ResumePoint
    ) -> None:
        self.limits, self._ports, self._proxy = limits, ports, proxy
        self.number = resume.number  # of the next batch that was never formed
        self.buffer = TrajectoryBuffer()
        self.counts = Counts()
        self._missing = deque(number for number in resume.missing if number < limits.batches)
        self.voids = resume.voids  # once the run has more, this scheduler is to be replaced by one that knows
        self._order = IssueOrder(limits, resume.cursor, resume.again, resume.behind)
        self._group_ports = GroupPorts(limits, proxy, ports.score, self._generated, self._note_start)
        self._running: dict[GroupKey, GroupRollout] = {}  # in the order they were started
        self._issued = 0
        self._left_behind: set[GroupRollout] = set()  # of the running ones: they were given up
        self._generating = 0  # responses still to come, of all that run
        self._generated_all = asyncio.Event()
        self._wave_full = False  # batch mode: nothing starts until all that runs has ended
        self._starts = Starts()
        self._discards: list[Discard] = []
        self._filtered_in_a_row = 0
        self._published = proxy.version  # the newest there is: the learner is ready for the batch of this number
        self._aborts: set[asyncio.Task[None]] = set()
        self._room = asyncio.Event()
        self._ready = asyncio.Event()
        proxy.on_change = self.wake

    @property
    def running(self) -> int:
        """Groups with responses or rewards still to come."""
        return len(self._running)

    def published(self, version: int) -> None:
        """There is a new version: the learner is ready for another batch."""
        self._published = max(self._published, version)
        self._ready.set()

    def wake(self) -> None:
        """An engine holds a new version, or another one is there: more may be admitted."""
        self.published(self._proxy.version)
        self._room.set()

    async def run(self) -> None:
        """Form batches until there are `limits.batches`; returns when what still runs has ended, too."""
        async with asyncio.TaskGroup() as tasks:
            admitting = tasks.create_task(self._admit(tasks))
            await self._form()
            admitting.cancel()

    # --- what is started ------------------------------------------------------------------------------------

    async def _admit(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            self._wave_full = self._wave_full and bool(self._running)
            while not self._wave_full and self._may_start():
                issue = self._order.next()
                self._issued += 1
                place = (issue.key, self._group_ports, issue.responses, self._issued)
                rollout = GroupRollout(*place, awaited=issue.awaited)
                self._running[issue.key] = rollout
                self._generating += issue.responses
                self._generated_all.clear()
                tasks.create_task(self._dispatch(rollout))
            self._wave_full = self.limits.mode == "batch" and bool(self._running)
            await self._room.wait()
            self._room.clear()

    def _may_start(self) -> bool:
        """Whether one more group may start; notes since when alpha alone is what holds the engines back."""
        limits, running = self.limits, len(self._running)
        free = running < limits.depth and self._generating < self._slots
        fresh, wanted = self._allowance() if free else (0, 0)
        held = free and fresh <= 0 < wanted and self._proxy.version >= 0
        self.counts.held.note(asyncio.get_running_loop().time(), holds=held)
        return min(fresh, wanted) > 0

    def _allowance(self) -> tuple[int, int]:
        """How many groups alpha allows to start now, and how many the run can still use."""
        limits, version, outstanding = self.limits, self._proxy.version, self._outstanding
        first, missing = self._next, list(self._missing)
        fresh = allowance(
            version, outstanding, number=self.number, missing=missing, groups=limits.groups, ahead=limits.lead
        )
        following = outstanding // limits.groups  # batches that what is under way may fill
        batch = missing[following] if following < len(missing) else self.number + following - len(missing)
        extra = self._order.enter(min(batch, math.floor(version + limits.lead)), version)
        if first > version + limits.lead:  # this version's batches are formed: extras would be for none
            extra = 0
        if first > version + limits.async_ratio:  # and so would be what is started now
            fresh = min(fresh, 0)
        return fresh + extra, self._unformed * limits.groups + extra - outstanding

    @property
    def _slots(self) -> float:
        """Requests that may be under way."""
        if self.limits.slots is None or self.limits.mode == "batch":
            return math.inf
        return min(self.limits.slots, self._proxy.capacity)

    @property
    def _unformed(self) -> int:
        """Batches that are still to be formed."""
        return max(0, self.limits.batches - self.number) + len(self._missing)

    @property
    def _outstanding(self) -> int:
        """Groups that may still come into a batch."""
        return len(self._running) - len(self._left_behind) + len(self.buffer)

    # --- what is under way ----------------------------------------------------------------------------------

    async def _dispatch(self, rollout: GroupRollout) -> None:
        """One dispatch, from prompt to buffer or discard."""
        ended = await rollout.run(self._ports.prompt(rollout.key.prompt))
        del self._running[rollout.key]
        self._left_behind.discard(rollout)
        if rollout.started_version is not None:
            self._starts.remove(rollout.started_version, rollout)
        self._freed(rollout.unanswered)
        if isinstance(ended, TrajectoryGroup):
            self._scored(ended, rollout)
        else:
            self._discard(ended)
        self._ready.set()

    async def _generated(self, tokens: int) -> None:
        """A response ended. In batch mode its reward waits for all the others."""
        self.counts.tokens += tokens
        self._freed(1)
        if self.limits.mode == "batch":
            await self._generated_all.wait()

    def _freed(self, responses: int) -> None:
        """So many requests are no longer to come."""
        self._generating -= responses
        self._room.set()
        if self._generating == 0:
            self._generated_all.set()

    def _note_start(self, rollout: GroupRollout, former: int | None) -> None:
        """It has started, or started again; one that waited so long that it would be for no batch is given up."""
        if former is not None:
            self._starts.remove(former, rollout)
        if rollout.started_version is not None and rollout not in self._left_behind:
            self._starts.add(rollout.started_version, rollout)
            if self._unformed and rollout.started_version < self._oldest_allowed(self._next):
                self._give_up(rollout)

    def _scored(self, group: TrajectoryGroup, rollout: GroupRollout) -> None:
        """A complete group: into the buffer, unless it is filtered or came too late."""
        self.counts.surplus_tokens += group.surplus_tokens
        why = filtered(self.limits.filter, [t.reward for t in group.trajectories])
        if why is not None:
            self._filtered(group, why)
        elif group.started_version < self._oldest_allowed(self._next):
            self._drop(group)
        else:
            self._filtered_in_a_row = 0
            self.buffer.add(self._ports.pack(group), rollout.number, awaited=rollout.awaited)
            self._count(group)

    def _filtered(self, group: TrajectoryGroup, why: str) -> None:
        self.counts.filtered[why] += 1
        self._filtered_in_a_row += 1
        self._discard(Discard(group.key, DiscardReason.FILTERED, group.started_version, group.response_tokens))
        if self.limits.filter and self._filtered_in_a_row >= self.limits.filter.most:
            raise RollflowError(
                f"rollout.filter removed {self._filtered_in_a_row} groups in a row (the last: {why}); "
                "widen it, or choose prompts that this policy sometimes answers right"
            )

    def _drop(self, group: TrajectoryGroup) -> None:
        self._discard(Discard(group.key, self._too_slow, group.started_version, group.response_tokens))

    def _discard(self, discard: Discard) -> None:
        self._discards.append(discard)
        self.counts.discards[discard.reason] += 1
        self.counts.discarded_tokens += discard.response_tokens
        self.counts.dropped_tokens += discard.response_tokens if discard.slow else 0
        self._order.ended(discard)

    # --- what is trained on ---------------------------------------------------------------------------------

    async def _form(self) -> None:
        """Form, commit and hand over one batch after another."""
        while self._missing or self.number < self.limits.batches:
            staged = self._stage()
            if staged is None:
                await self._ready.wait()
                self._ready.clear()
                continue
            await self._ports.commit(staged)

    @property
    def _next(self) -> int:
        """The number of the next batch to form."""
        return self._missing[0] if self._missing else self.number

    def _oldest_allowed(self, number: int) -> float:
        return number - self.limits.async_ratio

    def _stage(self) -> StagedBatch | None:
        """Choose the next batch if there is one; stale groups are discarded and issued again."""
        limits, number = self.limits, self._next
        full = len(self.buffer) >= limits.groups
        waits = full and self._must_wait(number)
        self.counts.waited.note(asyncio.get_running_loop().time(), holds=waits and number <= self._published)
        if not full or waits:
            return None
        taken = self.buffer.take(limits.groups, self._oldest_allowed(number), in_order=limits.order == "started")
        for group in taken.stale:
            self._drop(group)
        if taken.stale:
            self._room.set()
        if not taken.groups:
            return None
        self._advance()
        discards, self._discards = tuple(self._discards), []
        self._order.taken(group.key.prompt for group in taken.groups)
        return StagedBatch(number, taken.groups, self._order.take_issued(), discards)

    def _must_wait(self, number: int) -> bool:
        """Whether a group is still to come that this batch may not leave behind.

        While the learner is busy that is any group: a batch that is formed early must cost nobody its place.
        """
        if self.limits.order == "started":
            first = next((d for d in self._running.values() if d not in self._left_behind), None)
            return first is not None and self.buffer.before(first.number) < self.limits.groups
        bound, learner_is_busy = self._oldest_allowed(number + 1), number > self._published
        if self._starts.count(bound) if learner_is_busy else self._has_room_for_awaited(bound):
            return True
        if self.limits.at_bound == "drop" or self._missing:
            return False
        return any(self._crowds(number, later) for later in range(1, math.floor(self.limits.async_ratio) + 1))

    def _crowds(self, number: int, later: int) -> bool:
        """Whether this batch would take younger groups while more old ones run than the `later` batches hold that may
        still take those: some would be dropped in the end."""
        bound, groups = self._oldest_allowed(number + 1 + later), self.limits.groups
        return self._starts.count(bound) > later * groups and self.buffer.older(bound) < groups

    def _has_room_for_awaited(self, bound: float) -> bool:
        """Whether the batch would take one that runs and is awaited, of those that were started before `bound`.

        More groups than it holds may have come to the bound at once: the first awaited one by rank has room, or none.
        It is asked after every group that ends, so that one is looked for only where its version does not tell.
        """
        groups, version = self.limits.groups, self._starts.oldest_awaited(bound)
        if version is None or self.buffer.older(version) >= groups:
            return False
        if self.buffer.ahead_of(Rank(version, True, FIRST)) < groups:
            return True
        return self.buffer.ahead_of(Rank(version, False, self._starts.first_awaited(version))) < groups

    def _advance(self) -> None:
        """Go on to the next batch: the next one that is missing, or else a new one; drop what is too old for it."""
        if self._missing:
            self._missing.popleft()
        else:
            self.number += 1
        bound = self._oldest_allowed(self._next)
        for group in self.buffer.take(0, bound).stale:
            self._drop(group)
        if self._unformed:
            for rollout in self._starts.before(bound):
                self._give_up(rollout)
        self._room.set()

    def _give_up(self, rollout: GroupRollout) -> None:
        assert rollout.started_version is not None, "it was found by its start"
        self._starts.remove(rollout.started_version, rollout)
        self._left_behind.add(rollout)
        task = asyncio.create_task(rollout.give_up(self._too_slow))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    @property
    def _too_slow(self) -> DiscardReason:
        """What a group is called that was left behind: by design, or by chance."""
        return DiscardReason.REDUNDANT if self.limits.extra_groups else DiscardReason.STALE

    def _count(self, group: TrajectoryGroup) -> None:
        self.counts.trajectories += len(group.trajectories)
        rewards = [t.reward for t in group.trajectories]
        self.counts.reward_sum += sum(rewards)
        self.counts.recent_rewards.extend(rewards)
