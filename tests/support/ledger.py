"""Keeps a run's log in memory for one random schedule. At each commit, a plain model of the log checks the scheduler
and the state that rollflow computes from the log (the fold).

The model (`tests/support/log_model`) reads the bytes of the log's entries. It uses neither the fold nor the scheduler.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
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
from rollflow.storage.trajectories import StagedBatch, committed_group, committed_rates
from tests.support.epoch_rules import check_epochs
from tests.support.expected import limits_for
from tests.support.fold_comparison import compare_dispatches
from tests.support.log_model import Model

if TYPE_CHECKING:
    from tests.support.schedules import Case

MADE_UP = StoredObject("made/up", 0, "")  # artificial object that replaces every file
STUCK_SECONDS = 2000.0  # virtual seconds without a new batch; a correct batch takes far less


class Ledger:
    """A run's log and its model. Each commit is checked against all earlier entries."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.store = MemoryStore(f"schedule {uuid.uuid4().hex}")
        self.log = Log(self.store)
        prompts = [{"solved_every": source.solved_every} for source in case.sources]
        config = {"async_ratio": case.async_ratio, "group_size": case.group_size, "prompts": prompts}
        self.log.create(RunCreated("test", config, "", len(case.shares)))
        self.log.claim("supervisor")
        self.learner = self.log.claim("learner")
        self.version = -1
        self.batches: dict[int, StagedBatch] = {}  # batch number -> the batch, unless it was voided
        self.entries: dict[int, int] = {}  # batch number -> the entry that committed it
        self.model = Model()
        self.missing: list[int] = []
        self.started: dict[GroupKey, dict[int, int]] = {}  # version at which each sample first reached an engine
        self.discards: Counter[DiscardReason] = Counter()
        self._next = 0
        self._changed = asyncio.Event()
        self.publish(0)

    @property
    def issued(self) -> list[int]:
        """Number of prompts of each source that were issued."""
        return [self.model.issued[source] for source in range(len(self.case.shares))]

    @property
    def trained(self) -> list[list[tuple[GroupKey, list[tuple[int, ...]]]]]:
        """The dispatches (issues of prompts) and responses that each version was trained on."""
        batches = (self.batches[number].groups for number in range(self.case.batches))
        return [[(group.key, [t.tokens for t in group.trajectories]) for group in groups] for groups in batches]

    def scheduling(self) -> Writer:
        """Open the log as the scheduler of a starting process."""
        return Log(self.store).claim("scheduler")

    async def commit(self, writer: Writer, staged: StagedBatch, held: Sequence[GroupKey]) -> None:
        """Commit a batch after a short delay, then wait for room as in the channel.

        `held` has the dispatches that were neither trained on nor discarded when the scheduler staged the batch.
        """
        await asyncio.sleep(self.case.commit_seconds)
        assert staged.number == (self.missing[0] if self.missing else self._next)
        self._check_groups(staged)
        groups, rows = tuple(map(committed_group, staged.groups)), len(staged.groups) * self.case.group_size
        file = replace(MADE_UP, path=f"trajectories/{staged.number:08d}-{writer.claim}-made-up.arrow")
        rates = committed_rates(staged)
        body = BatchCommitted(staged.number, file, rows, groups, staged.issued, staged.discards, rates=rates)
        entry = self._read(writer.append(lambda state, stored: body))
        assert isinstance(entry.body, BatchCommitted)
        assert [group.key for group in entry.body.groups] == [group.key for group in staged.groups]
        limits = limits_for(self.case.limits)
        assert list(check_batch(entry.body, entry.claim, writer.log.state, limits)) == [], "an audit would accuse it"
        self.discards.update(discard.reason for discard in entry.body.discards)
        if self.missing:
            self.missing.pop(0)
        else:
            self._next += 1
        self._check_state(writer.log.state)
        assert len(set(held)) == len(held), "held twice"
        assert set(held) == set(self.model.open), "lost, or made up"
        self.batches[staged.number], self.entries[staged.number] = staged, entry.n
        self._news()
        await self.until(lambda: staged.number < self.version + int(self.case.async_ratio) + 1)

    def _read(self, entry: Entry) -> Entry:
        """Return the stored bytes of this entry."""
        return decode(self.store.get(entry_path(entry.n)), entry.n, self.store.get).entry

    def _check_groups(self, staged: StagedBatch) -> None:
        """Check that a batch has N groups of G finished responses, and that each response is as fresh as alpha
        requires. Its age is computed from the requests that the engines got.
        """
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
            assert len(set(versions)) <= self.case.turns

    def _check_state(self, state: RunState) -> None:
        """Let the model read the new entries, and compare the model with the state from which the next process would
        start.
        """
        for n in range(len(self.model.entries), state.n + 1):
            self.model.take(self.store.get(entry_path(n)), self.store.get)
        compare_dispatches(self.model, state)
        assert state.holes == self.missing == self.model.holes

    def void(self, count: int) -> None:
        """Void this many untrained batches; their prompts are issued again."""
        for number in [number for number in sorted(self.batches) if number >= self.version][:count]:
            self._append(BatchVoided(number, self.entries.pop(number), "made up"))
            del self.batches[number]
            self.missing.append(number)
        self.missing.sort()
        self.log.follow()
        self._check_state(self.log.state)

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
        self.log.follow()
        self._check_state(self.log.state)
        check_epochs(self.model, self.case)
        self.model.check_end(self.case.batches, self.case.groups, self.log.state.in_flight)

    def close(self) -> None:
        """Check that every dispatch was trained on or discarded."""
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
