"""Any order of commits, publications, deaths, damage and repeated calls, against a plain model of the run.

The model knows only what was committed and trained. After every step the channel may hand out nothing but the edition
that counts, and at the end the audit, from storage alone, must find every dispatch with exactly one fate.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter, deque
from contextlib import suppress
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from rollflow.storage.audit import audit
from rollflow.storage.channel import Channel
from rollflow.storage.errors import Conflict, Corrupt
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.policies import Manifest, PolicyStore, Retention
from rollflow.storage.records import Discard, DiscardReason, Ending, GroupKey, Trajectory, TrajectoryGroup
from rollflow.storage.settlement import newest_commit
from rollflow.storage.trajectories import BatchCommit, StagedBatch, TrajectoryStore, commit_path, committed_editions
from rollflow.tasks.clock import VirtualClockLoop
from rollflow.tasks.rollout.mixing import Mixture
from rollflow.tasks.rollout.scheduler import Beginning
from tests.support.described import describe
from tests.support.pipeline import Damage, StoredBatches, damaged

GROUPS, ALPHA = 2, 4
SHARES = (0.5, 0.3, 0.2)


class Scheduler:
    """What the real one keeps in its head, without the engines: it dies by being forgotten."""

    def __init__(self, run: MemoryStore, trained: int) -> None:
        self.batches = TrajectoryStore(run)
        found = Beginning.of(self.batches, trained)
        self.number, self.order, self.voids = found.number, found.order, found.voids
        self.mixture = Mixture(SHARES, found.cursor.issued, found.cursor.filtered)
        self.missing, self.again = deque(found.missing), deque(found.again)
        self.running: list[GroupKey] = []
        self.discards: list[Discard] = []
        self.behind = Counter(dict(found.behind))

    @property
    def place(self) -> tuple[int, int]:
        """The batch and edition it will commit next."""
        return self.missing[0] if self.missing else (self.number, 0)

    def dispatch(self) -> None:
        """Issue one group."""
        if self.again:
            self.running.append(self.again.popleft())
        else:
            self.running.append(GroupKey(self.mixture.next(), 0))

    def discard(self, key: GroupKey, reason: DiscardReason) -> None:
        """A group failed, was left behind, or was filtered for good."""
        self.running.remove(key)
        self.discards.append(Discard(key, reason, 0, 3))
        if reason is DiscardReason.STALE:
            self.behind[key.prompt] += 1
        if reason.issued_again:
            self.again.append(GroupKey(key.prompt, key.attempt + 1))
        else:
            self.mixture.filtered(key.prompt)

    def commit(self, version: int) -> tuple[BatchCommit, pa.Buffer]:
        """Form a batch of what runs longest."""
        while len(self.running) < GROUPS:
            self.dispatch()
        taken, self.running = self.running[:GROUPS], self.running[GROUPS:]
        number, edition = self.place
        in_flight = (*self.running, *self.again)
        prompts = {key.prompt for key in in_flight}
        staged = StagedBatch(
            number,
            tuple(group(key, version) for key in taken),
            self.mixture.state,
            in_flight,
            tuple(self.discards),
            edition,
            self.order,
            self.voids,
            tuple((prompt, times) for prompt, times in self.behind.items() if prompt in prompts),
        )
        self.discards = []
        made = self.batches.commit(staged, ALPHA)
        if self.missing:
            self.missing.popleft()
        else:
            self.number += 1
        self.order += 1
        return made


def group(key: GroupKey, version: int) -> TrajectoryGroup:
    one = Trajectory(0, version, (1, 2), (False, True), (0.0, -0.5), (-1, version), 1.0, "r", Ending.STOP)
    return TrajectoryGroup(key, f"p{key.prompt}", "test", (one,))


class Run(RuleBasedStateMachine):
    """One run's storage and channel, with as many schedulers and learners as chance will have."""

    @initialize()
    def begin(self) -> None:
        self.store = MemoryStore(uuid.uuid4().hex)
        describe(self.store, config={"async_ratio": ALPHA, "store": {"keep_last": 100, "keep_every": 10}})
        self.policies, self.batches = PolicyStore(self.store, Retention(100)), TrajectoryStore(self.store)
        self.runner = asyncio.Runner(loop_factory=VirtualClockLoop)
        self.committed: dict[tuple[int, int], bytes] = {}  # (number, edition) -> what was committed
        self.trained: dict[int, tuple[GroupKey, ...]] = {}
        self.publish(None)
        self.new_channel()
        self.schedulers = [Scheduler(self.store, 0)]

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.whole()
            self.runner.close()

    @property
    def version(self) -> int:
        """The newest policy version."""
        return len(self.trained)

    def publish(self, record: BatchCommit | None) -> None:
        version = self.policies.latest() + 1
        weights = self.policies.stage(version, {"weights/model.safetensors": b"w"})
        manifest = Manifest(version, None, weights, (), None)
        if record is not None:
            manifest = replace(
                manifest,
                parent=self.policies.manifest_sha256(version - 1),
                batch=self.batches.commit_sha256(record.number),
                consumed=record.groups,
                discarded=self.batches.discards(record),
            )
        self.policies.publish(manifest)

    @rule()
    def new_channel(self) -> None:
        """The channel died, and another one was started."""
        source = StoredBatches(TrajectoryStore(self.store))
        self.channel: Channel[object] = Channel(ALPHA + 1, source, self.version)

    @rule()
    def new_scheduler(self) -> None:
        """Another one starts from storage; the old ones may be dead, or only slow."""
        self.schedulers = [*self.schedulers[-2:], Scheduler(self.store, self.version)]

    @rule(
        which=st.integers(0, 2),
        count=st.integers(1, 5),
        failing=st.integers(0, 2),
        slow=st.integers(0, 2),
        filtered=st.integers(0, 3),
    )
    def dispatch(self, which: int, count: int, failing: int, slow: int, filtered: int) -> None:
        """Groups are issued; some of them fail or are too slow, and most that are filtered are of one source."""
        scheduler = self.schedulers[which % len(self.schedulers)]
        for _ in range(count):
            scheduler.dispatch()
        for key in scheduler.running[:failing]:
            scheduler.discard(key, DiscardReason.FAILED)
        for key in scheduler.running[:slow]:
            scheduler.discard(key, DiscardReason.STALE)
        for key in [key for key in scheduler.running if key.prompt % len(SHARES) == 1 or filtered == 3][:filtered]:
            scheduler.discard(key, DiscardReason.FILTERED)

    @rule(which=st.sampled_from([0, 1, 2, -1, -1]), puts=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def commit(self, which: int, puts: list[int]) -> None:
        """Batches are committed and handed over, or not, or repeatedly."""
        for times in puts:
            self.commit_one(which, times)

    def commit_one(self, which: int, puts: int) -> None:
        """One batch; or its scheduler learns that it is not the one."""
        scheduler = self.schedulers[which % len(self.schedulers)]
        place = scheduler.place
        if place[0] > self.version + ALPHA:
            return
        try:
            record, data = scheduler.commit(self.version)
        except Conflict:
            assert self.store.exists(commit_path(*place))  # a batch of another scheduler, or a settlement
            self.schedulers.remove(scheduler)
            if not self.schedulers:
                self.new_scheduler()
            return
        assert place not in self.committed
        self.committed[place] = data.to_pybytes()
        for _ in range(puts):
            self.runner.run(self.channel.put(record.number, data, 1, record.edition))

    @rule(
        how=st.sampled_from(["flipped", "cut", "gone", "commit"]), where=st.sampled_from([0, 0, 1]), met=st.booleans()
    )
    def damage(self, how: Damage, where: int, met: bool) -> None:
        """A batch rots that nobody has trained on, and perhaps the learner meets it at once."""
        waiting = [n for n in range(self.version, self.batches.next_number()) if self.batches.committed(n)]
        if not waiting:
            return
        try:
            record = self.batches.record(waiting[where % len(waiting)])
        except Corrupt:
            return  # its commit is damaged already
        if how == "commit" or self.store.exists(record.file):
            damaged(self.store, record, how)
        if met:
            self.learn(times=1, afresh=False)

    @rule(times=st.integers(1, 3), afresh=st.booleans())
    def learn(self, times: int, afresh: bool) -> None:
        """The learner leases its batch and trains on it, or voids it; every call may be repeated."""
        number = self.version
        try:
            for _ in range(times):
                leased = self.runner.run(self.channel.lease(number, 0, afresh=afresh))
            record, stored = self.batches.read(number)
        except TimeoutError:
            assert not self.batches.committed(number)
            return
        except Corrupt as error:
            for _ in range(times):
                self.batches.void(number, str(error))
            assert self.batches.current_edition(number) is None
            return
        assert leased == stored
        assert stored.to_pybytes() == self.committed[number, record.edition]
        self.publish(record)
        with pytest.raises(Conflict):
            self.policies.publish(self.policies.manifest(number + 1))  # a second learner
        self.trained[number] = record.groups
        for _ in range(times):
            self.runner.run(self.channel.ack(number))
            self.runner.run(self.channel.announce(self.version))

    @rule()
    def whole(self) -> None:
        """From storage alone, once what is damaged was noticed: clean, and nobody's prompt is lost."""
        Scheduler(self.store, self.version)  # settles; notices commits that cannot be read
        for number in range(self.version, self.batches.next_number()):
            self.batches.void(number, "looked for")
        scheduler = Scheduler(self.store, self.version)
        report = audit(self.store)
        assert report.violations == []
        assert report.fates["trained"] == GROUPS * self.version
        prompts = [key.prompt for groups in self.trained.values() for key in groups]
        assert len(prompts) == len(set(prompts))
        newest = newest_commit(self.batches)
        assert (set(newest.in_flight) if newest else set()) == set(scheduler.again)
        assert scheduler.behind == self.left_behind({key.prompt for key in scheduler.again})

    def left_behind(self, prompts: set[int]) -> Counter[int]:
        """How often these were, by all discards that can be read."""
        commits = []
        for name in committed_editions(self.store):
            with suppress(Corrupt):
                commits.append(self.batches.record_of(*name))
        discards = (d for commit in commits for d in commit.discards)
        return Counter(d.key.prompt for d in discards if d.slow and d.key.prompt in prompts)


Run.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestRun = Run.TestCase
