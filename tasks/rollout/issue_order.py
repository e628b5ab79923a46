"""Chooses which prompt the policy answers next, and collects slow prompts into training batches of their own.

A *round* is the set of prompts that are issued (given to the policy to answer) for one training batch. Prompts that
have to be issued again come before new prompts. A prompt whose group of responses was preempted (cancelled because it
was too slow) waits for the next policy version.

With tail batching (RollPacker, section 4), prompts that were often preempted wait in a queue, the *tail*, until they
fill a batch. A *short* round has no prompts from the tail; a *long* round has only prompts from the tail, and its batch
waits for all their responses. The last round of a run has only prompts from the tail, so that the policy is trained on
slow prompts, too.

A prompt source whose prompts all name a removed environment (`environments.mixed`) is closed until the run is resumed.
The other sources then get its share of the prompts.

If a prompt source skips solved questions, a new prompt of the source is issued only after the prompt's epoch has
started.

The environment may be reset for the next prompts before they are issued (`NextResets`).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass

from rollflow.storage.records import Cursor, Discard, DiscardReason, GroupKey, Prompt
from rollflow.tasks.environments.base import Environment, ResettingEnvironment
from rollflow.tasks.rollout.limits import RolloutLimits
from rollflow.tasks.rollout.mixing import Mixture

MOST_REMOVED = 50  # a source is closed after this number of consecutive prompts with a removed environment
# Prompts that were discarded for one of these reasons wait for a new policy version.
LATER = (DiscardReason.REDUNDANT, DiscardReason.STALE)


@dataclass(frozen=True, slots=True)
class Issue:
    """One group of responses to start: its key, its size, and whether a batch waits for the group."""

    key: GroupKey
    responses: int
    awaited: bool


class IssueOrder:
    """Chooses the prompts that the policy answers next."""

    def __init__(
        self,
        limits: RolloutLimits,
        cursor: Cursor,
        again: Iterable[GroupKey],
        behind: Iterable[tuple[int, int]] = (),
        epochs: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Start with the prompts in `again`, which were unfinished when the run stopped.

        Args:
            behind: for each prompt of `again`, how often its group of responses was preempted.
            epochs: for each prompt source that skips solved questions, the end of the newest epoch.
        """
        self._epoch_ends = dict(epochs)
        self._limits = limits
        self._behind = Counter(dict(behind))
        self._mixture = Mixture(limits.shares, cursor.issued, cursor.filtered)
        self._removed = Counter[int]()  # source -> number of newest consecutive prompts whose environment is removed
        self._again: deque[GroupKey] = deque()
        self._left: deque[GroupKey] = deque()  # preempted prompts, which wait for the next policy version
        self._tail: deque[GroupKey] = deque()
        for key in again:
            (self._tail if self._is_tail(key) else self._again).append(key)
        self._fresh: list[int] = []
        self._version = -1
        self._batch = -1  # number of the training batch for which prompts are issued now
        self._is_long = False
        self._long = 0  # number of slow prompts in `_tail` that still have to be issued for this batch

    def take_issued(self) -> tuple[int, ...]:
        """Return the prompts that were issued for the first time since the last call, in order."""
        issued, self._fresh = tuple(self._fresh), []
        return issued

    def advance(self, version: int) -> None:
        """Record the policy version of the engines; prompts preempted under an older version may start again."""
        if version > self._version:
            self._version = version
            self._again.extend(self._left)
            self._left.clear()

    def count_extra_groups(self, batch: int) -> int:
        """Return the number of extra (redundant) groups of responses to start for this batch."""
        return 0 if self._is_long_for(batch) else self._limits.redundant_groups

    def find_missing_epoch(self) -> tuple[int, int] | None:
        """Return the source and position of the next new prompt, if the epoch of that prompt has not started yet."""
        if self._again or not self._epoch_ends:
            return None
        source, position = self._mixture.find_next()
        return (source, position) if position >= self._epoch_ends.get(source, math.inf) else None

    def note_epoch(self, source: int, end: int) -> None:
        """Record that an epoch of a prompt source has started; `end` is the position after the epoch's last prompt."""
        self._epoch_ends[source] = end

    def next_issue(self, batch: int) -> Issue:
        """Return the next prompt to start for this training batch, and the number of its responses."""
        if batch > self._batch:
            self._is_long, self._batch = self._is_long_for(batch), batch
            self._long = min(len(self._tail), self._limits.groups) if self._is_long else 0
        if self._long:
            self._long -= 1
            return Issue(self._tail.popleft(), self._limits.group_size, awaited=True)
        spare = 0 if self._is_long else self._limits.redundant_responses
        key = self._take_key()
        awaited = self._limits.on_stale == "wait" or self._is_slow(key)
        return Issue(key, self._limits.group_size + spare, awaited)

    def list_next(self, count: int) -> list[int]:
        """Return at most `count` prompts that will probably be issued next, without issuing them. A later discard may
        change the order.
        """
        tail = [key.prompt for key in self._tail][: self._long]
        again = [*tail, *(key.prompt for key in self._again)][:count]
        return again + self._mixture.list_next(count - len(again), self._epoch_ends)

    def _is_long_for(self, batch: int) -> bool:
        if batch <= self._batch:
            return self._is_long
        last = batch >= self._limits.batches - 1
        return self._limits.tail_batching and (last or len(self._tail) >= self._limits.groups)

    def forget_slowness(self, prompts: Iterable[int]) -> None:
        """Reset the preemption counts of these prompts, because their groups of responses are now in a batch."""
        for prompt in prompts:
            self._behind.pop(prompt, None)

    def note_discard(self, discard: Discard) -> None:
        """Schedule the prompt of a discarded group of responses again; a filtered prompt is replaced by another
        prompt."""
        if discard.reason.issued_again:
            key = GroupKey(discard.key.prompt, discard.key.attempt + 1)
            if discard.slow:
                self._behind[key.prompt] += 1
            later = self._left if discard.reason in LATER else self._again
            (self._tail if self._is_tail(key) else later).append(key)
        else:
            self._behind.pop(discard.key.prompt, None)
            self._mixture.note_filtered(discard.key.prompt)

    def note_removed(self, prompt: int, why: str) -> None:
        """Record that a prompt was issued after its environment had been removed; close the prompt's source after
        `MOST_REMOVED` such prompts in a row.

        Raises:
            ConfigError: no other source is open.
        """
        source = prompt % len(self._limits.shares)
        self._removed[source] += 1
        if self._removed[source] == MOST_REMOVED:
            self._mixture.close_source(source, why)

    def note_playable(self, prompt: int) -> None:
        """Record that a prompt was issued whose environment is not removed."""
        self._removed.pop(prompt % len(self._limits.shares), None)

    def _is_tail(self, key: GroupKey) -> bool:
        return self._limits.tail_batching and self._is_slow(key)

    def _is_slow(self, key: GroupKey) -> bool:
        return self._behind[key.prompt] >= self._limits.awaited_after

    def _take_key(self) -> GroupKey:
        if self._again:
            return self._again.popleft()
        self._fresh.append(self._mixture.next())
        return GroupKey(self._fresh[-1], 0)


class NextResets:
    """Lets the environment reset for the prompts that are issued next. Nothing is issued or generated, so the order of
    prompts and their policy versions are the same as without resets ahead.
    """

    def __init__(
        self, environment: Environment, limits: RolloutLimits, read: Callable[[int], Awaitable[Prompt]]
    ) -> None:
        self._environment = environment if isinstance(environment, ResettingEnvironment) else None
        self._responses = limits.group_size + limits.redundant_responses
        self._read = read
        self._wanted = 0  # number of groups of responses that the run needs besides the started ones
        self._admitted = asyncio.Event()  # set once admission has started all groups that it allows

    def note_admission(self, wanted: int) -> None:
        """Record that admission allows no further group now, although the run needs `wanted` further groups."""
        self._wanted = wanted
        self._admitted.set()

    async def run(self, order: IssueOrder, running: Collection[GroupKey]) -> None:
        """Let the environment reset for the next prompts after each decision of admission; return only if the
        environment does not reset ahead. `running` contains the running groups of responses, of which some episodes
        have not started yet.
        """
        prompts: dict[int, Prompt] = {}
        while self._environment is not None and (most := self._environment.resets_ahead):
            await self._admitted.wait()
            self._admitted.clear()
            count = min(max(self._wanted, 0), math.ceil(most / self._responses))
            coming = {number: prompts.get(number) or await self._read(number) for number in order.list_next(count)}
            prompts |= coming
            if self._admitted.is_set():
                continue  # some of these prompts may have been issued meanwhile
            issued = {key.prompt: prompts[key.prompt] for key in running if key.prompt in prompts}
            episodes = [prompt for prompt in coming.values() for _ in range(self._responses)]
            self._environment.reset_ahead(episodes[:most], list(issued.values()))
            prompts = coming | issued
