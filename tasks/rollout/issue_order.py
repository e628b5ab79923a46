"""Which prompt is issued next, and how many extra ones: short rounds, and long rounds for prompts that were too slow.

A round is what is issued for one batch. Prompts that are to be issued again go first, then new prompts of the source
that the `Mixture` chooses. A prompt that was left behind waits for the next policy version: right after an update it
has the most time before its batch.

A prompt that was left behind `RolloutLimits.awaited_after` times is *awaited*: its batch waits for it. With tail
batching (RollPacker, section 4) it waits in the *tail* until there are enough of its kind. A *short* round issues N
groups of other prompts, and the extras. Once N prompts wait in the tail, the next round is *long*: those N, without
extras, and its batch waits for all of them. So every prompt is trained on, the slow ones together. The last round is
long, with the prompts that wait then and new ones. Otherwise a run would leave out its slowest prompts.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from rollflow.storage.records import Cursor, Discard, DiscardReason, GroupKey
from rollflow.tasks.rollout.limits import RolloutLimits
from rollflow.tasks.rollout.mixing import Mixture

LATER = (DiscardReason.REDUNDANT, DiscardReason.STALE)  # these are for the next version


@dataclass(frozen=True, slots=True)
class Issue:
    """One dispatch to start: how many responses to ask for, and whether its batch waits for it."""

    key: GroupKey
    responses: int
    awaited: bool


class IssueOrder:
    """The order of issue."""

    def __init__(
        self, limits: RolloutLimits, cursor: Cursor, again: Iterable[GroupKey], behind: Iterable[tuple[int, int]] = ()
    ) -> None:
        """`again` was in flight when the run stopped; `behind` says how often its prompts were left behind."""
        self._limits = limits
        self._behind = Counter(dict(behind))
        self._mixture = Mixture(limits.shares, cursor.issued, cursor.filtered)
        self._again: deque[GroupKey] = deque()
        self._left: deque[GroupKey] = deque()  # behind: for the next version
        self._tail: deque[GroupKey] = deque()
        for key in again:
            (self._tail if self._is_tail(key) else self._again).append(key)
        self._fresh: list[int] = []
        self._version = -1
        self._batch = -1  # that the present round is for
        self._is_long = False
        self._long = 0  # prompts of the tail that are still to be issued in it

    def take_issued(self) -> tuple[int, ...]:
        """The prompts that were dispatched for the first time since this was last asked, in their order."""
        issued, self._fresh = tuple(self._fresh), []
        return issued

    def advance(self, version: int) -> None:
        """The engines hold this version: what was left behind under an older one may be issued again."""
        if version > self._version:
            self._version = version
            self._again.extend(self._left)
            self._left.clear()

    def spare(self, batch: int) -> int:
        """How many groups the round for this batch has to spare."""
        return 0 if self._is_long_for(batch) else self._limits.extra_groups

    def next(self, batch: int) -> Issue:
        """The next dispatch; it is for this batch, whose round it begins if it is the first."""
        if batch > self._batch:
            self._is_long, self._batch = self._is_long_for(batch), batch
            self._long = min(len(self._tail), self._limits.groups) if self._is_long else 0
        if self._long:
            self._long -= 1
            return Issue(self._tail.popleft(), self._limits.group_size, awaited=True)
        spare = 0 if self._is_long else self._limits.extra_responses
        key = self._key()
        awaited = self._limits.at_bound == "wait" or self._is_slow(key)
        return Issue(key, self._limits.group_size + spare, awaited)

    def _is_long_for(self, batch: int) -> bool:
        if batch <= self._batch:
            return self._is_long
        last = batch >= self._limits.batches - 1
        return self._limits.tail_batching and (last or len(self._tail) >= self._limits.groups)

    def taken(self, prompts: Iterable[int]) -> None:
        """Groups of these prompts are in a batch: forget how slow they were."""
        for prompt in prompts:
            self._behind.pop(prompt, None)

    def ended(self, discard: Discard) -> None:
        """A dispatch was discarded: issue its prompt again, unless another of its source takes its place."""
        if discard.reason.issued_again:
            key = GroupKey(discard.key.prompt, discard.key.attempt + 1)
            if discard.slow:
                self._behind[key.prompt] += 1
            later = self._left if discard.reason in LATER else self._again
            (self._tail if self._is_tail(key) else later).append(key)
        else:
            self._behind.pop(discard.key.prompt, None)
            self._mixture.filtered(discard.key.prompt)

    def _is_tail(self, key: GroupKey) -> bool:
        return self._limits.tail_batching and self._is_slow(key)

    def _is_slow(self, key: GroupKey) -> bool:
        return self._behind[key.prompt] >= self._limits.awaited_after

    def _key(self) -> GroupKey:
        if self._again:
            return self._again.popleft()
        self._fresh.append(self._mixture.next())
        return GroupKey(self._fresh[-1], 0)
