"""A run's log with an independent account of every dispatch, which relies neither on the fold nor on the scheduler.

The account is kept from the bytes of the log's entries. At each commit it is compared with the fold's state and with
the scheduler's own state.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rollflow.storage.audit.commits import check_batch
from rollflow.storage.log.entries import (
    BatchCommitted,
    BatchVoided,
    Entry,
    RunCreated,
    VersionPublished,
    decode,
    entry_path,
)
from rollflow.storage.log.run_log import Log, Writer
from rollflow.storage.log.state import RunState
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import DiscardReason, GroupKey, StopReason, StoredObject, Trajectory
from rollflow.storage.trajectories import StagedBatch, committed_group
from tests.support.expected import limits_for
from tests.support.log_runs import read

if TYPE_CHECKING:
    from tests.support.schedules import Case

MADE_UP = StoredObject("made/up", 0, "")  # an artificial object in place of every file
STUCK_SECONDS = 2000.0  # virtual seconds without a new batch; a correct batch takes far less


class Ledger:
    """A run's log and an account of every dispatch. Each commit is checked against all earlier entries."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.store = MemoryStore(f"schedule {uuid.uuid4().hex}")
        self.log = Log(self.store)
        config = {"async_ratio": case.async_ratio, "group_size": case.group_size}
        self.log.create(RunCreated("test", config, "", len(case.shares)))
        self.log.claim("supervisor")
        self.learner = self.log.claim("learner")
        self.version = -1
        self.batches: dict[int, StagedBatch] = {}  # batch number -> the batch, unless it was voided
        self.entries: dict[int, int] = {}  # batch number -> the entry that committed it
        self.issued, self.filtered = [0] * len(case.shares), [0] * len(case.shares)  # per source
        self.open: set[GroupKey] = set()  # dispatches without a fate
        self.missing: list[int] = []
        self.started: dict[GroupKey, dict[int, int]] = {}  # version at which each sample first reached an engine
        self.discards: Counter[DiscardReason] = Counter()
        self.slow: Counter[int] = Counter()  # prompt -> how often it ran and was preempted
        self._next = 0
        self._changed = asyncio.Event()
        self.publish(0)

    @property
    def trained(self) -> list[list[tuple[GroupKey, list[tuple[int, ...]]]]]:
        """The dispatches and responses that each version was trained on."""
        batches = (self.batches[number].groups for number in range(self.case.batches))
        return [[(group.key, [t.tokens for t in group.trajectories]) for group in groups] for groups in batches]

    def scheduling(self) -> Writer:
        """Open the log as the scheduler of a starting process."""
        return Log(self.store).claim("scheduler")

    async def commit(self, writer: Writer, staged: StagedBatch, held: Sequence[GroupKey]) -> None:
        """Commit a batch after a moment, then wait for room as in the channel.

        `held` are the dispatches without a fate when the scheduler staged the batch.
        """
        await asyncio.sleep(self.case.commit_seconds)
        assert staged.number == (self.missing[0] if self.missing else self._next)
        self._check_groups(staged)
        groups, rows = tuple(map(committed_group, staged.groups)), len(staged.groups) * self.case.group_size
        file = replace(MADE_UP, path=f"trajectories/{staged.number:08d}-{writer.claim}-made-up.arrow")
        body = BatchCommitted(staged.number, file, rows, groups, staged.issued, staged.discards)
        entry = self._read(writer.append(lambda state, stored: body))
        assert isinstance(entry.body, BatchCommitted)
        assert [group.key for group in entry.body.groups] == [group.key for group in staged.groups]
        limits = limits_for(self.case.limits)
        assert list(check_batch(entry.body, entry.claim, writer.log.state, limits)) == [], "an audit would accuse it"
        self._account(entry.body)
        assert len(set(held)) == len(held), "held twice"
        assert set(held) == self.open, "lost, or made up"
        self._check_state(writer.log.state)
        self.batches[staged.number], self.entries[staged.number] = staged, entry.n
        if self.missing:
            self.missing.pop(0)
        else:
            self._next += 1
        self._news()
        await self.until(lambda: staged.number < self.version + int(self.case.async_ratio) + 1)

    def _read(self, entry: Entry) -> Entry:
        """Return the stored bytes of this entry."""
        return decode(self.store.get(entry_path(entry.n)), entry.n, self.store.get).entry

    def _check_groups(self, staged: StagedBatch) -> None:
        """Check a batch: N groups of G finished responses, each as fresh as alpha demands, by what the engines saw."""
        case = self.case
        assert len(staged.groups) == case.groups
        for group in staged.groups:
            assert len({t.sample for t in group.trajectories}) == len(group.trajectories) == case.group_size
            for trajectory in group.trajectories:
                self._check_trajectory(trajectory, self.started[group.key][trajectory.sample])
                assert staged.number - case.async_ratio <= trajectory.started_version <= self.version, "alpha is broken"

    def _check_trajectory(self, one: Trajectory, started: int) -> None:
        versions = [version for version, mine in zip(one.versions, one.loss_mask, strict=True) if mine]
        assert one.ending in (StopReason.STOP, StopReason.LENGTH)
        assert versions
        assert versions == sorted(versions)
        assert one.started_version == (min(versions) if self.case.staleness_from == "oldest-token" else started)
        if self.case.in_flight == "restart":
            assert len(set(versions)) == 1

    def _account(self, body: BatchCommitted) -> None:
        """Check that since the previous commit every dispatch has exactly one fate or is open, and none is unknown."""
        for prompt in body.issued:
            place = divmod(prompt, len(self.issued))
            assert place == (self.issued[place[1]], place[1]), "a gap, or issued before"
            self.issued[place[1]] += 1
        new = {GroupKey(prompt, 0) for prompt in body.issued}
        again = {_again(d.key) for d in body.discards if d.reason.issued_again}
        ended = [group.key for group in body.groups] + [discard.key for discard in body.discards]
        known = self.open | new | again
        assert len(self.open) + len(new) + len(again) == len(known), "an attempt is made twice"
        assert len(set(ended)) == len(ended), "two fates"
        assert set(ended) <= known, "a fate of what was not open"
        self.open = known - set(ended)
        for discard in body.discards:
            self.filtered[discard.key.prompt % len(self.filtered)] += discard.reason is DiscardReason.FILTERED
        self.discards.update(d.reason for d in body.discards)
        self.slow.update(d.key.prompt for d in body.discards if d.slow)

    def _check_state(self, state: RunState) -> None:
        """Check that the state from which the next process would start equals the account."""
        assert (state.issued, state.filtered) == (self.issued, self.filtered)
        assert set(state.in_flight) == self.open
        assert len(state.in_flight) == len(self.open)
        waiting = {key.prompt for key in self.open}
        assert state.behind == {prompt: n for prompt, n in self.slow.items() if prompt in waiting}

    def void(self, count: int) -> None:
        """Void this many untrained batches; their prompts are issued again."""
        for number in [number for number in sorted(self.batches) if number >= self.version][:count]:
            self._append(BatchVoided(number, self.entries.pop(number), "made up"))
            gone = self.batches.pop(number)
            self.missing.append(number)
            self.open |= {_again(group.key) for group in gone.groups}
        self.missing.sort()
        self.log.follow()
        self._check_state(self.log.state)
        assert self.log.state.holes == self.missing

    async def batch(self, number: int) -> StagedBatch:
        """Wait for a batch, for a bounded time, and return it."""
        try:
            async with asyncio.timeout(STUCK_SECONDS):
                await self.until(lambda: number in self.batches)
        except TimeoutError:
            raise AssertionError(f"no batch {number} within {STUCK_SECONDS:g} virtual seconds") from None
        return self.batches[number]

    def publish(self, version: int) -> None:
        """Record a trained version."""
        batch = self.entries[version - 1] if version else None
        self._append(VersionPublished(version, batch, (MADE_UP,), (MADE_UP,)))
        self.version = version
        self._news()

    def _append(self, body: BatchVoided | VersionPublished) -> None:
        self.learner.append(lambda state, stored: body)

    def check_end(self) -> None:
        """Check the whole log once more."""
        check_log(read(self.store), self.case.batches, self.case.groups, self.open)

    def close(self) -> None:
        """Check that every dispatch has a fate."""
        self.log.settle()
        for path in list(self.store.list()):
            self.store.delete(path)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds after some change."""
        while not condition():
            await self._changed.wait()

    def _news(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def check_log(entries: Sequence[Entry], versions: int, groups: int, open_: Collection[GroupKey]) -> None:
    """Check the entries of an ended run, without the fold.

    All versions exist, each trained on its own batch of `groups`, and no prompt is trained on twice. Every dispatch was
    issued once and has one fate, or is in `open_`. Each source was issued without gaps, and so was each attempt.
    """
    issued, ended, batches = Counter[GroupKey](), Counter[GroupKey](), dict[int, BatchCommitted]()
    trained = list[int]()
    for entry in entries:
        match entry.body:
            case BatchCommitted() as body:
                issued.update(GroupKey(prompt, 0) for prompt in body.issued)
                issued.update(_again(discard.key) for discard in body.discards if discard.reason.issued_again)
                ended.update([group.key for group in body.groups] + [discard.key for discard in body.discards])
                batches[entry.n] = body
            case BatchVoided() as body:
                issued.update(_again(group.key) for group in batches.pop(body.entry).groups)
            case VersionPublished() as body if body.batch_entry is not None:
                batch = batches.pop(body.batch_entry)
                assert (batch.number, len(batch.groups)) == (body.number - 1, groups)
                trained += [group.prompt for group in batch.groups]
    published = [entry.body.number for entry in entries if isinstance(entry.body, VersionPublished)]
    assert published == list(range(versions + 1))
    assert len(set(trained)) == len(trained) == versions * groups, "a prompt is trained on twice"
    assert {*issued.values(), *ended.values()} == {1}, "one dispatch, one fate"
    assert len(open_) + len(ended) == len(issued)
    assert {*open_, *ended} == set(issued), "lost, or made up"
    created = entries[0].body
    assert isinstance(created, RunCreated)
    for source in range(created.sources):
        prompts = sorted(key.prompt for key in issued if key.attempt == 0 and key.prompt % created.sources == source)
        assert prompts == list(range(source, source + len(prompts) * created.sources, created.sources)), "a gap"


def _again(key: GroupKey) -> GroupKey:
    return GroupKey(key.prompt, key.attempt + 1)
