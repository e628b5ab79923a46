"""The rollout scheduler: every dispatched prompt ends in exactly one committed fate.

    prompts --admission--> group: G x (generate -> verify) --> buffer --N groups--> commit --> channel
                ^                         |                      |
                |                         | failed               | stale
                +------ issued again <----+----------------------+

What each loop waits for, and what ends the wait:

- `_admit` waits for room: a new version, a group that ended, a batch that was formed.
- a group waits for its engines and its verifier; both are bounded (a dead engine raises, a verdict has a deadline).
- `_form` waits for N fresh groups, then for the commit and for room in the channel.

The cursor, the dispatches in flight and the discards are committed with each batch, taken at one moment of
the event loop; a scheduler that starts from the newest commit issues again exactly what was in flight. Batches that
were voided are formed again first.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rollflow.storage.batch import packed
from rollflow.storage.buffer import TrajectoryBuffer
from rollflow.storage.errors import EngineFailed
from rollflow.storage.records import (
    Discard,
    DiscardReason,
    Ending,
    GroupKey,
    Prompt,
    Trajectory,
    TrajectoryGroup,
)
from rollflow.storage.settlement import missing, newest_commit, settled
from rollflow.storage.trajectories import StagedBatch, TrajectoryStore
from rollflow.tasks.engines.base import GenerationRequest
from rollflow.tasks.rewards.pool import ScoreRequest
from rollflow.tasks.rewards.verifier import Score
from rollflow.tasks.rollout.admission import AdmissionState, allowance
from rollflow.tasks.rollout.proxy import InferenceProxy


@dataclass(frozen=True, slots=True)
class Plan:
    """The numbers a scheduler works to."""

    seed: int
    batches: int  # to form in all, counted from the run's beginning
    groups: int  # N, groups in a batch
    group_size: int  # G, responses to one prompt
    async_ratio: float
    depth: int  # groups running at a time
    attempts: int  # times a failing group is issued
    max_new_tokens: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a scheduler starts: a new run, or what storage says of an old one."""

    number: int = 0  # of the first batch that was never committed
    cursor: int = 0
    again: tuple[GroupKey, ...] = ()
    missing: tuple[tuple[int, int], ...] = ()  # batches to form again, as (number, edition)
    order: int = 0  # commits there are
    voids: int = 0  # voids that are settled

    @classmethod
    def of(cls, batches: TrajectoryStore, trained: int) -> Beginning:
        """Continue a run from storage alone, after settling what was voided; `trained` is its newest version."""
        trained = max(trained, 0)
        while True:
            newest = settled(batches, trained)
            if newest is None:
                return cls()
            found = cls(
                number=batches.next_number(),
                cursor=newest.cursor,
                again=newest.in_flight,
                missing=missing(batches, trained, newest.voids),
                order=newest.order + 1,
                voids=newest.voids,
            )
            if newest_commit(batches) == newest:  # else another scheduler committed while this one read
                return found


@dataclass(frozen=True, slots=True)
class Outside:
    """What the scheduler calls: prompts, the verifier, the durable commit with the channel behind it."""

    prompt: Callable[[int], Prompt]
    score: Callable[[ScoreRequest], Awaitable[Score]]
    commit: Callable[[StagedBatch], Awaitable[None]]


@dataclass(slots=True)
class Counts:
    """What a scheduler has done since it started."""

    tokens: int = 0
    trajectories: int = 0
    reward_sum: float = 0.0
    discards: Counter[str] = field(default_factory=Counter)
    recent_rewards: deque[float] = field(default_factory=lambda: deque(maxlen=512))


class RolloutScheduler:
    """Takes prompts to committed batches. See the module's docstring for the guarantees."""

    def __init__(self, plan: Plan, outside: Outside, proxy: InferenceProxy, beginning: Beginning) -> None:
        self.plan, self._outside, self._proxy = plan, outside, proxy
        self.number = beginning.number  # of the next batch that was never formed
        self.buffer = TrajectoryBuffer()
        self.counts = Counts()
        self._missing = deque(place for place in beginning.missing if place[0] < plan.batches)
        self._formed = beginning.number - len(beginning.missing)
        self.voids = beginning.voids  # once the run has more, this scheduler is to be replaced by one that knows
        self._order = beginning.order
        self._cursor = beginning.cursor
        self._again = deque(beginning.again)
        self._running: set[GroupKey] = set()
        self._discards: list[Discard] = []
        self._room = asyncio.Event()
        self._ready = asyncio.Event()

    @property
    def running(self) -> int:
        """Groups with responses or rewards still to come."""
        return len(self._running)

    def wake(self) -> None:
        """The engines hold a new version: more may be admitted."""
        self._room.set()

    async def run(self) -> None:
        """Form batches until there are `plan.batches`; then abandon what still runs."""
        async with asyncio.TaskGroup() as tasks:
            admitting = tasks.create_task(self._admit(tasks))
            await self._form()
            admitting.cancel()

    async def _admit(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            for _ in range(self._allowance()):
                key = self._next_key()
                self._running.add(key)
                tasks.create_task(self._group(key))
            await self._room.wait()
            self._room.clear()

    def _allowance(self) -> int:
        plan = self.plan
        state = AdmissionState(
            version=self._proxy.version,
            batched=self._formed * plan.groups,
            outstanding=len(self._running) + len(self.buffer),
            running=len(self._running),
        )
        total = plan.batches * plan.groups
        return allowance(state, groups=plan.groups, async_ratio=plan.async_ratio, depth=plan.depth, total=total)

    def _next_key(self) -> GroupKey:
        """What was discarded goes first; then the next prompt that was never issued."""
        if self._again:
            return self._again.popleft()
        self._cursor += 1
        return GroupKey(self._cursor - 1, 0)

    async def _group(self, key: GroupKey) -> None:
        """One dispatch, from prompt to buffer or discard."""
        prompt, failure = self._outside.prompt(key.prompt), None
        try:
            async with asyncio.TaskGroup() as samples:
                made = [samples.create_task(self._sample(prompt, key, s)) for s in range(self.plan.group_size)]
        except* EngineFailed as failed:
            failure = failed.exceptions[0]
        if failure:
            self._failed(key, failure)
            return
        group = packed(TrajectoryGroup(key, prompt.id, prompt.domain, tuple(task.result() for task in made)))
        self._running.discard(key)
        self.buffer.add(group)
        self._count(group)
        self._ready.set()
        self._room.set()

    def _failed(self, key: GroupKey, failure: Exception) -> None:
        """The engines died under a group: discard it and issue it again, unless that happened too often."""
        self._running.discard(key)
        self._discard(key, DiscardReason.FAILED, self._proxy.version, 0)
        if key.attempt + 1 >= self.plan.attempts or self._proxy.version < 0:
            raise failure
        self._room.set()

    async def _sample(self, prompt: Prompt, key: GroupKey, sample: int) -> Trajectory:
        """One response and its reward; the reward starts as soon as the response ends."""
        clock = asyncio.get_running_loop().time
        began = clock()
        request = GenerationRequest(
            id=f"{key.prompt}.{key.attempt}.{sample}",
            prompt=prompt.tokens,
            max_new_tokens=self.plan.max_new_tokens,
            temperature=self.plan.temperature,
            seed=sample_seed(self.plan.seed, key, sample),
        )
        started = await self._proxy.generate(request)
        generated = clock()
        made = started.generation
        self.counts.tokens += len(made.tokens)
        score = await self._outside.score(ScoreRequest(made.tokens, prompt.reference))
        asked = len(prompt.tokens)
        return Trajectory(
            sample=sample,
            started_version=started.version,
            tokens=prompt.tokens + made.tokens,
            loss_mask=(False,) * asked + (True,) * len(made.tokens),
            logprobs=(0.0,) * asked + made.logprobs,
            versions=(-1,) * asked + made.versions,
            reward=score.reward,
            reason=score.reason,
            ending=Ending(made.ending),
            generation_seconds=generated - began,
            reward_seconds=clock() - generated,
        )

    async def _form(self) -> None:
        """Form, commit and hand over one batch after another."""
        while self._missing or self.number < self.plan.batches:
            staged = self._stage()
            if staged is None:
                await self._ready.wait()
                self._ready.clear()
                continue
            await self._outside.commit(staged)

    def _stage(self) -> StagedBatch | None:
        """Choose the next batch if there is one; stale groups are discarded and issued again."""
        number, edition = self._missing[0] if self._missing else (self.number, 0)
        taken = self.buffer.take(self.plan.groups, number - self.plan.async_ratio)
        for group in taken.stale:
            self._discard(group.key, DiscardReason.STALE, group.started_version, group.response_tokens)
        if taken.stale:
            self._room.set()
        if not taken.groups:
            return None
        discards, self._discards = tuple(self._discards), []
        in_flight = (*sorted(self._running), *self.buffer.keys, *self._again)
        staged = StagedBatch(number, taken.groups, self._cursor, in_flight, discards, edition, self._order, self.voids)
        self._advance()
        return staged

    def _advance(self) -> None:
        """Go on to the next batch: the next one that is missing, or else a new one."""
        if self._missing:
            self._missing.popleft()
        else:
            self.number += 1
        self._formed += 1
        self._order += 1
        self._room.set()

    def _discard(self, key: GroupKey, reason: DiscardReason, started: int, tokens: int) -> None:
        self._discards.append(Discard(key, reason, started, tokens))
        self._again.append(GroupKey(key.prompt, key.attempt + 1))
        self.counts.discards[reason] += 1

    def _count(self, group: TrajectoryGroup) -> None:
        self.counts.trajectories += len(group.trajectories)
        rewards = [t.reward for t in group.trajectories]
        self.counts.reward_sum += sum(rewards)
        self.counts.recent_rewards.extend(rewards)


def sample_seed(seed: int, key: GroupKey, sample: int) -> int:
    """A 63-bit seed for one response: the same dispatch of the same run always samples alike."""
    text = f"{seed}:{key.prompt}:{key.attempt}:{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
