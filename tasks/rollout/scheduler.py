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

Whether one more group starts, and whether a batch is formed, are pure questions: see `admission` and `formation`. Which
prompts go together: see `issue_order`.

What was issued and what was discarded since the batch before is committed with each batch, taken at one moment of the
event loop; a scheduler that starts from the run's log issues again exactly what is open there. Batches that were voided
are formed again first.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rollflow.storage.batch import packed
from rollflow.storage.errors import ConfigError
from rollflow.storage.log.state import RunState
from rollflow.storage.records import Cursor, Discard, DiscardReason, FinishedGroup, GroupKey, Prompt, TrajectoryGroup
from rollflow.storage.token_arrays import ANY_TOKEN
from rollflow.storage.trajectories import StagedBatch
from rollflow.tasks.environments.base import Environment
from rollflow.tasks.environments.single_turn import SINGLE_TURN
from rollflow.tasks.rollout import admission
from rollflow.tasks.rollout.admission import Due, Room, Supply
from rollflow.tasks.rollout.buffer import TrajectoryBuffer
from rollflow.tasks.rollout.counts import Counts
from rollflow.tasks.rollout.formation import Formation
from rollflow.tasks.rollout.group import GroupPorts, GroupRollout
from rollflow.tasks.rollout.issue_order import Issue, IssueOrder
from rollflow.tasks.rollout.limits import RolloutLimits, filtered
from rollflow.tasks.rollout.proxy import InferenceProxy
from rollflow.tasks.rollout.running_by_version import Starts
from rollflow.tasks.verifiers.base import Score
from rollflow.tasks.verifiers.pool import ScoreRequest


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a scheduler starts: a new run, or what the log says of an old one."""

    number: int = 0  # of the first batch that was never committed
    cursor: Cursor = field(default_factory=Cursor)
    again: tuple[GroupKey, ...] = ()
    missing: tuple[int, ...] = ()  # batches to form again
    voids: int = 0  # that it knows of
    behind: tuple[tuple[int, int], ...] = ()  # prompts of `again` that were left behind, and how often
    redraws: tuple[tuple[int, int], ...] = ()  # prompts that were in batches that are not finite, and how often

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
            redraws=tuple(state.redraws.items()),
        )


@dataclass(frozen=True, slots=True)
class SchedulerPorts:
    """What the scheduler calls: prompts, the environment, the verifier, the durable commit with the channel behind it.

    `pack` gets a group ready for its batch as soon as it is complete; a simulation has nothing to write.
    """

    prompt: Callable[[int], Prompt]
    score: Callable[[ScoreRequest], Awaitable[Score]]
    commit: Callable[[StagedBatch], Awaitable[None]]
    pack: Callable[[TrajectoryGroup], FinishedGroup] = packed
    environment: Environment = SINGLE_TURN
    vocabulary: int = ANY_TOKEN  # tokens that the policy has


class RolloutScheduler:
    """Takes prompts to committed batches. See the module's docstring for the guarantees."""

    def __init__(
        self, limits: RolloutLimits, ports: SchedulerPorts, proxy: InferenceProxy, resume: ResumePoint
    ) -> None:
        self.limits, self._ports, self._proxy = limits, ports, proxy
        missing = tuple(number for number in resume.missing if number < limits.batches)
        self.due = Due(resume.number, missing, limits.batches)
        self.voids = resume.voids  # once the run has more, this scheduler is to be replaced by one that knows
        self.buffer, self.counts = TrajectoryBuffer(), Counts()
        self._order = IssueOrder(limits, resume.cursor, resume.again, resume.behind)
        self._redraws = dict(resume.redraws)
        self._starts = Starts()
        self._formation = Formation(limits, self.buffer, self._starts)
        self._group_ports = GroupPorts(
            limits, proxy, ports.score, self._generated, self._started, ports.environment, ports.vocabulary
        )
        self._running: dict[GroupKey, GroupRollout] = {}  # in the order they were started
        self._issued = 0
        self._left_behind: set[GroupRollout] = set()  # of the running ones: they were given up
        self._generating = 0  # responses still to come, of all that run
        self._discards: list[Discard] = []
        self._filtered_in_a_row = 0
        self._published = proxy.version  # the newest there is: the learner is ready for the batch of this number
        self._aborts: set[asyncio.Task[None]] = set()
        self._room, self._ready = asyncio.Event(), asyncio.Event()
        proxy.on_change = self.wake
        self._order.advance(proxy.version)

    @property
    def number(self) -> int:
        """Of the next batch that was never formed."""
        return self.due.number

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
        self._order.advance(self._proxy.version)
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
        """Start groups while there is room, then wait for room."""
        while True:
            self._start_groups(tasks)
            await self._room.wait()
            self._room.clear()

    def _start_groups(self, tasks: asyncio.TaskGroup) -> None:
        while (room := self._admission()).opens:
            self._start(room.batch, tasks)
        self.counts.held.note(asyncio.get_running_loop().time(), holds=room.is_held)

    def _admission(self) -> Room:
        supply = self._supply()
        return admission.room(supply, self.limits, self._order.spare(admission.next_batch(supply, self.limits)))

    def _supply(self) -> Supply:
        limits = self.limits
        return Supply(
            version=self._proxy.version,
            due=self.due,
            running=len(self._running),
            outstanding=len(self._running) - len(self._left_behind) + len(self.buffer),
            generating=self._generating,
            slots=math.inf if limits.slots is None else min(limits.slots, self._proxy.capacity),
        )

    def _start(self, batch: int, tasks: asyncio.TaskGroup) -> None:
        issue = self._order.next(batch)
        self._issued += 1
        rollout = self._rollout(issue)
        self._running[issue.key] = rollout
        self._generating += issue.responses
        tasks.create_task(self._dispatch(rollout))

    def _rollout(self, issue: Issue) -> GroupRollout:
        redraws = self._redraws.get(issue.key.prompt, 0)
        return GroupRollout(
            issue.key, self._group_ports, issue.responses, self._issued, awaited=issue.awaited, redraws=redraws
        )

    # --- what is under way ----------------------------------------------------------------------------------

    async def _dispatch(self, rollout: GroupRollout) -> None:
        """One dispatch, from prompt to buffer or discard."""
        ended = await rollout.run(self._ports.prompt(rollout.key.prompt))
        del self._running[rollout.key]
        self._left_behind.discard(rollout)
        self._starts.remove(rollout)
        self._freed(rollout.unanswered)
        if isinstance(ended, TrajectoryGroup):
            self._scored(ended, rollout)
        else:
            self._discard(ended)
        self._ready.set()

    async def _generated(self, tokens: int) -> None:
        """A response ended."""
        self.counts.tokens += tokens
        self._freed(1)

    def _freed(self, responses: int) -> None:
        """So many requests are no longer to come."""
        self._generating -= responses
        self._room.set()

    def _started(self, rollout: GroupRollout, version: int) -> None:
        """It has started, or started again; one that waited so long that it would be for no batch is given up."""
        if rollout not in self._left_behind:
            self._starts.add(version, rollout)
            if self.due.count and version < self._formation.oldest_allowed(self.due.first):
                self._give_up(rollout)

    def _scored(self, group: TrajectoryGroup, rollout: GroupRollout) -> None:
        """A complete group: into the buffer, unless it is filtered or came too late."""
        self.counts.surplus_tokens += group.surplus_tokens
        why = filtered(self.limits.filter, [t.reward for t in group.trajectories])
        if why is not None:
            self._filtered(group, why)
        elif group.started_version < self._formation.oldest_allowed(self.due.first):
            self._drop(group)
        else:
            self._filtered_in_a_row = 0
            self.buffer.add(self._ports.pack(group), rollout.number, awaited=rollout.awaited)
            self.counts.trajectories += len(group.trajectories)

    def _filtered(self, group: TrajectoryGroup, why: str) -> None:
        self.counts.filtered[why] += 1
        self._filtered_in_a_row += 1
        self._discard(Discard(group.key, DiscardReason.FILTERED, group.started_version, group.response_tokens))
        if self.limits.filter and self._filtered_in_a_row >= self.limits.filter.most:
            raise ConfigError(  # a scheduler that is started again would generate as many in vain
                f"rollout.filter removed {self._filtered_in_a_row} groups in a row (the last: {why}); "
                "widen it, or choose prompts that this policy sometimes answers right"
            )

    def _drop(self, group: FinishedGroup) -> None:
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
        while self.due.count:
            if (staged := self._stage()) is not None:
                await self._ports.commit(staged)
            else:
                await self._ready.wait()
                self._ready.clear()

    def _stage(self) -> StagedBatch | None:
        """Take the groups of the next batch, if it is to be formed now."""
        number = self.due.first
        waits = self._formation.is_full and self._must_wait(number)
        self.counts.waited.note(asyncio.get_running_loop().time(), holds=waits and number <= self._published)
        if not self._formation.is_full or waits:
            return None
        groups = self.buffer.take(self.limits.groups, in_order=self.limits.order == "started")
        self._advance()
        discards, self._discards = tuple(self._discards), []
        self._order.taken(group.key.prompt for group in groups)
        return StagedBatch(number, groups, self._order.take_issued(), discards)

    def _must_wait(self, number: int) -> bool:
        running = (rollout.number for rollout in self._running.values() if rollout not in self._left_behind)
        return self._formation.must_wait(
            number, running, learner_is_busy=number > self._published, is_lost=bool(self.due.missing)
        )

    def _advance(self) -> None:
        """Go on to the next batch; drop and give up what is too old for it."""
        self.due = self.due.after_first()
        bound = self._formation.oldest_allowed(self.due.first)
        for group in self.buffer.drop(bound):
            self._drop(group)
        if self.due.count:
            for rollout in self._starts.before(bound):
                self._give_up(rollout)
        self._room.set()

    def _give_up(self, rollout: GroupRollout) -> None:
        self._starts.remove(rollout)
        self._left_behind.add(rollout)
        task = asyncio.create_task(rollout.give_up(self._too_slow))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    @property
    def _too_slow(self) -> DiscardReason:
        """What a group is called that was left behind: by design, or by chance."""
        return DiscardReason.REDUNDANT if self.limits.extra_groups else DiscardReason.STALE
