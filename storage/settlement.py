"""Settling voids: after a batch was quarantined, every dispatch has exactly one fate again.

The groups of a voided edition are discarded as corrupt and issued again, and the batch is formed anew. Both follow
from one commit without groups. It is created under the very name the next batch would have been committed under, so
that of all schedulers which do not know of the void yet none can commit anything more: they get `Conflict`.

    ... batch 6 | batch 7 | void of 6 | settlement, as 8 | batch 6, edition 1 | batch 8, edition 1 | batch 9 ...

What is in flight is worked out from the fates of all dispatches, so a commit that is itself unreadable can be settled
like any other: what only it knew of counts as corrupt, or as never issued. So are the cursors: how far a source was
issued is the most that any commit says, and how many of its groups were filtered is counted.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest

from rollflow.storage.errors import Conflict, Corrupt, Missing
from rollflow.storage.policies import PolicyStore
from rollflow.storage.records import Cursor, Discard, DiscardReason, GroupKey
from rollflow.storage.trajectories import (
    BatchCommit,
    TrajectoryStore,
    commit_path,
    committed_editions,
)

READERS = 16  # commits read at a time

History = Mapping[tuple[int, int], BatchCommit | None]  # (number, edition) -> commit; None: it cannot be read


def settled(batches: TrajectoryStore, trained: int) -> BatchCommit | None:
    """The newest commit of the run, after all voids are settled; None for a run that has none.

    Args:
        trained: the newest policy version; batches below it were consumed and are past voiding.
    """
    while True:
        newest = newest_commit(batches)
        if newest is not None and newest.voids >= batches.voided():
            return newest
        if newest is None and batches.next_number() == 0:
            return None
        with contextlib.suppress(Conflict):  # another scheduler settled or committed first: read again
            _settle(batches, trained)


def newest_commit(batches: TrajectoryStore) -> BatchCommit | None:
    """The commit that was made last; None if there is none, or one that may be it cannot be read and is not voided."""
    gone = {(void.batch, void.edition) for void in batches.voids()}
    heads = []
    for name in _heads(batches):
        try:
            heads.append(batches.record_of(*name))
        except Corrupt:
            if name not in gone:
                return None
    return max(heads, key=lambda commit: commit.order, default=None)


def missing(batches: TrajectoryStore, trained: int, voids: int) -> tuple[tuple[int, int], ...]:
    """Batches to form again, as (number, edition): committed once, not trained, and without an edition that counts."""
    wanted = ((number, batches.edition(number, voids)) for number in range(trained, batches.next_number()))
    return tuple((n, edition) for n, edition in wanted if not batches.run.exists(commit_path(n, edition)))


def _heads(batches: TrajectoryStore) -> list[tuple[int, int]]:
    """The last editions of the last batch and of all voided ones; the newest commit is one of them."""
    numbers = {void.batch for void in batches.voids()} | {batches.next_number() - 1}
    heads = []
    for number in sorted(numbers - {-1}):
        edition = 0
        while batches.run.exists(commit_path(number, edition + 1)):
            edition += 1
        heads.append((number, edition))
    return heads


def _settle(batches: TrajectoryStore, trained: int) -> None:
    for number in {*range(trained, batches.next_number()), *(number for number, _ in _heads(batches))}:
        _void_unreadable(batches, number)
    voids = batches.voids()
    history = _history(batches)
    last = max((c for c in history.values() if c), key=lambda commit: commit.order, default=None)
    known = last.voids if last else 0
    # A voided edition that was trained on all the same is the last of its batch: nothing came after it.
    unused = {(v.batch, v.edition) for v in voids if v.batch >= trained or (v.batch, v.edition + 1) in history}
    account = _account(batches, history, unused, trained)
    number, edition = _next_name(history, {(v.batch, v.edition) for v in voids[:known]}, trained)
    in_flight = account.in_flight()
    commit = BatchCommit(
        number=number,
        edition=edition,
        order=last.order + 1 if last else 0,
        voids=len(voids),
        file="",
        rows=0,
        size=0,
        sha256="",
        groups=(),
        started_versions=(),
        response_tokens=(),
        cursor=account.cursor,
        in_flight=in_flight,
        discards=tuple(account.corrupt),
        behind=tuple((key.prompt, times) for key in in_flight if (times := account.behind[key.prompt])),
        writer=batches.writer,
    )
    if committed_editions(batches.run) != list(history):
        raise Conflict("another scheduler committed while this one read")
    batches.run.create(commit.path, commit.to_json())


def _void_unreadable(batches: TrajectoryStore, number: int) -> None:
    try:
        batches.record(number)
    except Missing:
        return
    except Corrupt as error:
        batches.void(number, str(error))


def _next_name(history: History, gone: set[tuple[int, int]], trained: int) -> tuple[int, int]:
    """Where the last commit's scheduler, which knows only of the voids `gone`, would commit next.

    From the history alone: a commit that came after it was read must not move the name, but be met there.
    """
    number = 0
    while (number, 0) in history:
        edition = 0
        while (name := (number, edition)) in gone or ((seen := history.get(name)) and not seen.groups):
            edition += 1
        if number >= trained and name not in history:
            return name
        number += 1
    return number, 0


def _history(batches: TrajectoryStore) -> History:
    def read(name: tuple[int, int]) -> BatchCommit | None:
        try:
            return batches.record_of(*name)
        except Corrupt:
            return None

    names = committed_editions(batches.run)
    with ThreadPoolExecutor(READERS) as readers:
        return dict(zip(names, readers.map(read, names), strict=True))


@dataclass(slots=True)
class _Account:
    """The fates of all dispatches: whether each one's prompt is to be issued again after it."""

    issued: tuple[int, ...] = ()  # of each source
    filtered: set[int] = field(default_factory=set)  # prompts
    behind: Counter[int] = field(default_factory=Counter)  # prompt -> times it was left behind
    fates: dict[GroupKey, bool] = field(default_factory=dict)
    corrupt: list[Discard] = field(default_factory=list)  # fates that are still to be committed

    def add(self, used: tuple[GroupKey, ...], discards: tuple[Discard, ...], cursor: Cursor) -> None:
        """What a commit says."""
        self.fates.update(dict.fromkeys(used, False))
        self.fates.update({d.key: d.reason.issued_again for d in discards})
        self.behind.update(d.key.prompt for d in discards if d.slow)
        self.filtered |= {d.key.prompt for d in discards if d.reason is DiscardReason.FILTERED}
        self.issued = tuple(map(max, zip_longest(self.issued, cursor.issued, fillvalue=0)))

    @property
    def cursor(self) -> Cursor:
        """How far each source was issued, and how much of it was filtered."""
        sources = range(len(self.issued))
        gone = Counter(prompt % len(sources) for prompt in self.filtered)
        return Cursor(self.issued, tuple(gone[source] for source in sources))

    def discard(self, key: GroupKey, started: int, tokens: int) -> None:
        """Give a dispatch the fate of being corrupt, unless it has one."""
        if key not in self.fates:
            self.fates[key] = True
            self.corrupt.append(Discard(key, DiscardReason.CORRUPT, started, tokens))

    def attempts(self) -> dict[int, int]:
        """Prompt -> its newest attempt that has a fate, or -1."""
        newest = dict.fromkeys(self.cursor.indices(), -1)
        for key in self.fates:
            newest[key.prompt] = max(newest.get(key.prompt, -1), key.attempt)
        return newest

    def close(self) -> None:
        """Discard earlier attempts whose end no readable commit tells."""
        for prompt, attempt in self.attempts().items():
            for earlier in range(attempt):
                self.discard(GroupKey(prompt, earlier), 0, 0)

    def in_flight(self) -> tuple[GroupKey, ...]:
        """What is issued and has no fate."""
        newest = sorted(self.attempts().items())
        return tuple(GroupKey(p, a + 1) for p, a in newest if self.fates.get(GroupKey(p, a), True))


def _account(batches: TrajectoryStore, history: History, unused: set[tuple[int, int]], trained: int) -> _Account:
    """All fates there are; the groups of `unused` editions have none but what a discard says."""
    account = _Account()
    for (number, edition), commit in history.items():
        if commit is not None:
            used = () if (number, edition) in unused else commit.groups
            account.add(used, commit.discards, commit.cursor)
        elif number < trained:  # what it said lives on in the ledger
            manifest = PolicyStore(batches.run).manifest(number + 1)
            account.add(manifest.consumed, manifest.discarded, manifest.cursor)
    for name in sorted(unused):
        if (lost := history.get(name)) is not None:
            for group in zip(lost.groups, lost.started_versions, lost.response_tokens, strict=True):
                account.discard(*group)
    account.close()
    return account
