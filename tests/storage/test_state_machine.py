"""Tests stores and channel together, with random sequences of commits, publications, deaths, damage and repeated calls.

The test remembers which entry committed each batch, and which groups were trained on. The channel may lease only
batches that wait according to the log, and the newest owner of a role is never refused. At the end the audit, which
reads only storage, must find exactly one outcome of every dispatch (attempt to answer a prompt). `test_fold` tests the
rules of the log in the same way.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter, deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from rollflow.storage.audit.audit import audit
from rollflow.storage.channel import Channel
from rollflow.storage.errors import Corrupt
from rollflow.storage.log.entries import BatchCommitted, Entry, VersionPublished
from rollflow.storage.log.run_log import Log
from rollflow.storage.log.state import CommittedBatch, Deposed, EntryRefused
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.policies import PolicyStore
from rollflow.storage.records import Discard, DiscardReason, GroupKey
from rollflow.storage.trajectories import StagedBatch, TrajectoryStore, verify
from rollflow.tasks.rollout.mixing import Mixture
from rollflow.tasks.rollout.resuming.resume_point import ResumePoint
from rollflow.tasks.runtime.clock import VirtualClockLoop
from tests.support.batches import group
from tests.support.counts import examples
from tests.support.described import describe
from tests.support.log_runs import of_kind
from tests.support.pipeline import Damage, StoredBatches, damaged

GROUPS, ALPHA = 2, 4
SHARES = (0.5, 0.3, 0.2)


class Scheduler:
    """The in-memory state of a scheduler, without engines; dropping the object simulates its death."""

    def __init__(self, run: MemoryStore) -> None:
        self.batches = TrajectoryStore(Log(run))
        self.writer = self.batches.log.claim("scheduler")
        self.begin()

    def begin(self) -> None:
        """Read the scheduler's state from the log alone."""
        self.batches.log.follow()
        found = ResumePoint.of_state(self.batches.log.state)
        self.number, self.voids = found.number, found.voids
        self.mixture = Mixture(SHARES, found.cursor.issued, found.cursor.filtered)
        self.missing, self.again = deque(found.missing), deque(found.again)
        self.running: list[GroupKey] = []
        self.issued: list[int] = []
        self.discards: list[Discard] = []
        self.behind = Counter(dict(found.behind))

    @property
    def place(self) -> int:
        """The number of the batch that this scheduler will commit next."""
        return self.missing[0] if self.missing else self.number

    def dispatch(self) -> None:
        """Issue one group."""
        if self.again:
            self.running.append(self.again.popleft())
        else:
            self.issued.append(self.mixture.next())
            self.running.append(GroupKey(self.issued[-1], 0))

    def discard(self, key: GroupKey, reason: DiscardReason) -> None:
        """Discard a group that failed, was preempted or was filtered."""
        self.running.remove(key)
        self.discards.append(Discard(key, reason, 0, 3))
        if reason.issued_again:
            self.again.append(GroupKey(key.prompt, key.attempt + 1))
        else:
            self.mixture.note_filtered(key.prompt)

    def commit(self, version: int) -> tuple[Entry, bytes]:
        """Form a batch of the groups that were issued first, and commit the batch."""
        while len(self.running) < GROUPS:
            self.dispatch()
        taken, self.running = self.running[:GROUPS], self.running[GROUPS:]
        groups = tuple(group(key.prompt, version, key.attempt) for key in taken)
        staged = StagedBatch(self.place, groups, tuple(self.issued), tuple(self.discards))
        self.issued, self.discards = [], []
        entry, data = self.batches.commit(self.writer, staged)
        if self.missing:
            self.missing.popleft()
        else:
            self.number += 1
        return entry, data.to_pybytes()


class Learner:
    """A learner, with the part of the log that it has read."""

    def __init__(self, run: MemoryStore) -> None:
        log = Log(run)
        self.batches, self.policies = TrajectoryStore(log), PolicyStore(log)
        self.writer = log.claim("learner")

    def publish(self, version: int, batch_entry: int | None) -> None:
        """Publish a version, and prune the objects that the retention rules no longer require."""
        files = {"weights/model.safetensors": b"w", "learner/state.safetensors": b"s"}
        weights, state = ((stored,) for stored in self.policies.stage(self.writer, version, files))
        self.policies.publish(self.writer, VersionPublished(version, batch_entry, weights, state))
        self.policies.prune(self.writer)


class Run(RuleBasedStateMachine):
    """One run's storage and channel, with random numbers of schedulers and learners."""

    @initialize()
    def begin(self) -> None:
        self.store = MemoryStore(uuid.uuid4().hex)
        config = {"async_ratio": ALPHA, "group_size": 2, "store": {"keep_last": 2, "keep_every": 10}}
        describe(self.store, config=config, sources=len(SHARES))
        self.log = Log(self.store)
        self.log.claim("supervisor")
        self.runner = asyncio.Runner(loop_factory=VirtualClockLoop)
        self.committed: dict[int, bytes] = {}  # maps a log entry to the bytes of the batch that the entry committed
        self.trained: dict[int, tuple[GroupKey, ...]] = {}
        self.learner = Learner(self.store)
        self.learner.publish(0, None)
        self.new_channel()
        self.schedulers = [Scheduler(self.store)]

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.whole()
            self.runner.close()

    @property
    def version(self) -> int:
        """The newest policy version."""
        return len(self.trained)

    @property
    def waiting(self) -> dict[int, CommittedBatch]:
        """The batches that wait according to the log."""
        self.log.follow()
        return self.log.state.waiting

    @rule()
    def new_channel(self) -> None:
        """Replace the channel by an empty one, as after the death of the channel's process."""
        source = StoredBatches(TrajectoryStore(Log(self.store)))
        self.channel: Channel[object] = Channel(ALPHA + 1, source, self.version)

    @rule()
    def new_scheduler(self) -> None:
        """Start another scheduler from the log; the old schedulers may be dead, or only slow."""
        self.schedulers = [*self.schedulers[-2:], Scheduler(self.store)]

    @rule()
    def new_learner(self) -> None:
        """Start another learner, and check that the old learner can publish no version."""
        old, self.learner = self.learner, Learner(self.store)
        if self.version in self.waiting:
            with pytest.raises(Deposed):
                old.publish(self.version + 1, self.waiting[self.version].entry)

    @rule(
        which=st.integers(0, 2),
        count=st.integers(1, 5),
        failing=st.integers(0, 2),
        slow=st.integers(0, 2),
        filtered=st.integers(0, 3),
    )
    def dispatch(self, which: int, count: int, failing: int, slow: int, filtered: int) -> None:
        """Issue groups, and discard some as failed, stale or filtered. Most filtered groups belong to the same
        source.
        """
        scheduler = self.schedulers[which % len(self.schedulers)]
        for _ in range(count):
            scheduler.dispatch()
        for key in scheduler.running[:failing]:
            scheduler.discard(key, DiscardReason.FAILED)
        for key in scheduler.running[:slow]:
            scheduler.discard(key, DiscardReason.STALE)
        for key in [key for key in scheduler.running if key.prompt % len(SHARES) == 1 or filtered == 3][:filtered]:
            scheduler.discard(key, DiscardReason.FILTERED)

    @rule(
        which=st.sampled_from([0, -1, -1]),
        puts=st.lists(st.integers(0, 2), min_size=1, max_size=3),
        hears=st.sampled_from([True, True, False]),
    )
    def commit(self, which: int, puts: list[int], hears: bool) -> None:
        """Commit batches, and put each batch into the channel zero to two times. The scheduler may not know yet that a
        batch was voided.
        """
        for times in puts:
            scheduler = self.schedulers[which % len(self.schedulers)]
            scheduler.batches.log.follow()
            if hears and scheduler.batches.log.state.voids > scheduler.voids:
                scheduler.begin()
            self.commit_one(scheduler, times)

    def commit_one(self, scheduler: Scheduler, puts: int) -> None:
        """Commit one batch, unless the scheduler is deposed."""
        if scheduler.place > self.version + ALPHA:
            return
        try:
            entry, data = scheduler.commit(self.version)
        except Deposed:
            assert scheduler is not max(self.schedulers, key=lambda one: one.writer.claim)
            self.schedulers.remove(scheduler)
            return
        assert isinstance(entry.body, BatchCommitted)
        self.committed[entry.n] = data
        for _ in range(puts):
            self.runner.run(self.channel.put(entry.body.number, data, 1, entry.n))

    @rule(how=st.sampled_from(["flipped", "cut", "gone"]), where=st.sampled_from([0, 0, 1]), met=st.booleans())
    def damage(self, how: Damage, where: int, met: bool) -> None:
        """Damage the file of a batch that was not trained on; if `met` is true, let the learner read the file at
        once.
        """
        waiting = sorted(self.waiting)
        if not waiting:
            return
        file = self.waiting[waiting[where % len(waiting)]].file
        if self.store.exists(file.path):
            damaged(self.store, file, how)
        if met:
            self.learn(times=1, afresh=False)

    @rule(how=st.sampled_from(["flipped", "cut", "gone"]), puts=st.integers(0, 2))
    def make_again(self, how: Damage, puts: int) -> None:
        """Damage the next batch to train on, so that it is voided, and form it again. If `puts` is 0, the batch is not
        put.
        """
        if self.version in self.waiting:
            self.damage(how, 0, met=True)
            scheduler = max(self.schedulers, key=lambda one: one.writer.claim)
            scheduler.begin()
            self.commit_one(scheduler, puts)

    @rule(times=st.integers(1, 3), afresh=st.booleans())
    def learn(self, times: int, afresh: bool) -> None:
        """Let the learner lease its batch, and train on the batch or void the batch. Repeat each call `times` times."""
        number, learner = self.version, self.learner
        waiting = learner.batches.find_waiting(number)
        try:
            for _ in range(times):
                leased = self.runner.run(self.channel.lease(number, 0, afresh=afresh))
            assert waiting is not None
            verify(waiting.file, leased)  # type: ignore[arg-type]  # the leased payload is the file's bytes
            stored = learner.batches.read(waiting.file)
        except TimeoutError:
            assert waiting is None
            return
        except Corrupt as error:
            voided = [learner.batches.void(learner.writer, number, str(error)) for _ in range(times)]
            assert voided == [True, False, False][:times]
            assert learner.batches.find_waiting(number) is None
            return
        assert leased == stored == self.committed[waiting.entry]
        learner.publish(number + 1, waiting.entry)
        with pytest.raises(EntryRefused):
            learner.publish(number + 1, waiting.entry)  # a repeated call is refused
        self.trained[number] = tuple(one.key for one in waiting.groups)
        for _ in range(times):
            self.runner.run(self.channel.ack(number))
            self.runner.run(self.channel.announce(self.version))

    @rule()
    def whole(self) -> None:
        """Void damaged batches; then check from storage alone that the audit is clean and that no prompt is lost."""
        self.schedulers = [Scheduler(self.store)]
        [scheduler] = self.schedulers
        for number in sorted(self.waiting):
            scheduler.batches.void(scheduler.writer, number, "looked for")
        scheduler.begin()
        report = audit(self.store, deep=True)
        assert report.violations == []
        assert report.fates["trained"] == GROUPS * self.version
        assert list(scheduler.missing) == [n for n in range(self.version, scheduler.number) if n not in self.waiting]
        again = [key.prompt for key in scheduler.again]
        ended = [key.prompt for groups in self.trained.values() for key in groups]
        ended += [one.prompt for batch in self.waiting.values() for one in batch.groups]
        ended += [one.key.prompt for one in self.discards() if one.reason is DiscardReason.FILTERED]
        issued = scheduler.mixture.state
        assert sorted([*again, *ended]) == [i for i in range(max(issued.upcoming)) if issued.covers(i)]
        assert scheduler.behind == Counter(d.key.prompt for d in self.discards() if d.slow and d.key.prompt in again)

    def discards(self) -> list[Discard]:
        """Return all discards that the log's entries record."""
        bodies = [entry.body for entry in of_kind(self.store, BatchCommitted)]
        return [one for body in bodies if isinstance(body, BatchCommitted) for one in body.discards]


Run.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestRun = pytest.mark.many(Run.TestCase)
