"""Tests the log's rules with random histories, and compares them with a plain model of the log. Several writers append
entries, and each writer has read the log up to a random entry.

The model (`tests/support/log_model`) knows only the entries and keeps the whole history. After every step the log's
rules and the model must agree. An entry that the rules refuse must also be refused by the model. Random entries, which
are made from legal entries by small changes, must be accepted by both or by neither.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from rollflow.storage.errors import Unreachable
from rollflow.storage.log import entries as entries_module
from rollflow.storage.log import run_log as log_module
from rollflow.storage.log import snapshots
from rollflow.storage.log.entries import Body, Entry, Role, decode, entry_path
from rollflow.storage.log.rules import apply, decide
from rollflow.storage.log.run_log import Log
from rollflow.storage.log.state import Deposed, EntryRefused, GroupTooOld, RunState
from rollflow.storage.objects.base import Data
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import DiscardReason
from tests.support.counts import examples
from tests.support.fold_comparison import compare
from tests.support.log_actors import Learner, Scheduler, Supervisor, create_run
from tests.support.log_drawn import BODY, Json, changed, legal
from tests.support.log_model import Model

Actor = Supervisor | Scheduler | Learner


class Killed(BaseException):
    """The error that simulates a process that is killed during a write."""


class Lossy(MemoryStore):
    """A store whose next writes of entries fail as `faults` says: the answer is lost, or the writer is killed."""

    faults: ClassVar[deque[str]] = deque()  # faults of the only store that exists at a time

    def create(self, path: str, data: Data) -> None:
        fault = self.faults.popleft() if self.faults and path.startswith("log/") else ""
        if fault == "killed before":
            raise Killed
        if fault == "before":
            raise Unreachable(f"{path}: not written")
        super().create(path, data)
        if fault == "after":
            raise Unreachable(f"{path}: written, and the answer was lost")
        if fault == "killed after":
            raise Killed


def same(one: RunState, other: RunState) -> bool:
    """Return whether two states are equal, with their open dispatches in the same order."""
    return one == other and snapshots.to_bytes(one) == snapshots.to_bytes(other)


class Run(RuleBasedStateMachine):
    """One run's log, with up to three writers of each role. Deposed writers continue until they notice that another
    process has claimed their role.
    """

    @initialize(
        alpha=st.sampled_from([0, 0.5, 1, 2.5]),
        keep_last=st.integers(1, 3),
        keep_every=st.integers(1, 5),
        state_every=st.integers(1, 3),
        full_every=st.integers(1, 4),
        solved_every=st.sampled_from([1, 2, 2]),
        every=st.integers(2, 7),
        largest=st.sampled_from([700, 1 << 18]),
    )
    def begin(self, alpha: float, every: int, largest: int, **config: int) -> None:
        self.patched = pytest.MonkeyPatch()
        self.patched.setattr(snapshots, "EVERY", every)
        self.patched.setattr(entries_module, "LARGEST", largest)  # longer entries have an index object
        self.patched.setattr(log_module, "FIRST_PAUSE", 0.0)
        self.patched.setattr(log_module, "decide", self.asked)
        Lossy.faults.clear()
        self.store, self.model, self.states = Lossy(uuid.uuid4().hex), Model(), [RunState()]
        self.last: tuple[RunState, Role, int, Body] | None = None
        create_run(self.store, alpha, **config)
        self.supervisors: list[Supervisor] = []
        self.schedulers: list[Scheduler] = []
        self.learners: list[Learner] = []
        self.learn()
        for role in ("supervisor", "learner", "scheduler"):
            self.claim(role, 0)
        self.act(self.learners, 0, lambda learner: learner.publish())

    def teardown(self) -> None:
        if hasattr(self, "patched"):
            Lossy.faults.clear()
            try:
                self.whole()
            finally:
                self.patched.undo()

    @property
    def actors(self) -> list[Actor]:
        return [*self.supervisors, *self.schedulers, *self.learners]

    # --- checks after each step -------------------------------------------------------------------------------

    def asked(self, state: RunState, n: int, role: Role, claim: int, body: Body) -> RunState:
        """Ask the log's rules whether an entry may follow, and remember the question for the model."""
        self.last = (state, role, claim, body)
        return decide(state, n, role, claim, body)

    def learn(self) -> None:
        """Let the model and the log's rules read the appended entries, and check that the two states agree."""
        while self.store.exists(entry_path(len(self.model.entries))):
            n, state = len(self.model.entries), self.states[-1]
            data = self.store.get(entry_path(n))
            self.model.take(data, self.store.get)
            before = snapshots.to_bytes(state)
            self.states.append(apply(state, decode(data, n, self.store.get)))
            assert snapshots.to_bytes(state) == before, "apply changed its argument"
            compare(self.model, self.states[-1])
        for actor in self.actors:
            assert same(actor.log.state, self.states[actor.log.state.n + 1])

    def act(self, actors: list[Any], which: int, step: Callable[[Any], Entry | None]) -> None:
        """Let one of `actors` append an entry; remove the actor if it was deposed or killed."""
        actor, count = actors[which % len(actors)], len(self.model.entries)
        try:
            self.appended(actor.writer.role, step(actor), count)
        except EntryRefused as refusal:
            self.refused(refusal, count)
            if isinstance(refusal, Deposed):
                actors.remove(actor)
        except Killed:
            actors.remove(actor)
        self.learn()

    def appended(self, role: Role, entry: Entry | None, count: int) -> None:
        """Check that an append returned the newest log entry, and wrote no other entry."""
        self.learn()
        if entry is not None:
            assert len(self.model.entries) == count + 1 == entry.n + 1
            assert (self.model.entries[-1]["id"], self.model.entries[-1]["role"]) == (entry.id, role)

    def refused(self, refusal: EntryRefused, count: int) -> None:
        """Check that the model also refuses the entry after the newest one, and that no entry was appended."""
        assert not self.store.exists(entry_path(count))
        assert self.last is not None
        state, role, claim, body = self.last
        assert state.n == count - 1, "who is refused has read everything"
        why = self.model.why_not(role, claim, BODY.dump_python(body, mode="json"))
        assert why, f"refused without need: {refusal}"
        assert isinstance(refusal, Deposed) == (why in ("deposed", "under an old supervisor"))
        assert isinstance(refusal, GroupTooOld) == (why == "stale")

    # --- starts of roles --------------------------------------------------------------------------------------

    def start(self, actors: list[Any], make: Callable[[], Actor]) -> None:
        for actor in self.actors:
            actor.log.settle()  # no snapshot is written while the new actor starts
        count = len(self.model.entries)
        try:
            actor = make()
        except EntryRefused as refusal:
            self.refused(refusal, count)
        except Killed:
            pass
        else:
            actors.append(actor)
            del actors[:-3]
        self.learn()

    @rule(role=st.sampled_from(["supervisor", "scheduler", "learner"]), which=st.sampled_from([-1, -1, 0]))
    def claim(self, role: str, which: int) -> None:
        """Start a role under the newest supervisor, or under a deposed supervisor."""
        claims = [entry["n"] for entry in self.model.entries if entry["role"] == "supervisor"]
        if role == "supervisor" or not claims:
            self.start(self.supervisors, lambda: Supervisor(self.store))
        elif role == "scheduler":
            self.start(self.schedulers, lambda: Scheduler(self.store, claims[which]))
        else:
            self.start(self.learners, lambda: Learner(self.store, claims[which]))

    @rule(
        which=st.sampled_from([-1, -1, 0]),
        key=st.sampled_from(["async_ratio", "groups", "versions", "train", "store"]),
        value=st.sampled_from([0, 1, 3]),
        again=st.booleans(),
    )
    def change(self, which: int, key: str, value: int, again: bool) -> None:
        """Let a supervisor change the config, which ends the claims of the roles; if `again` is true, restart the
        roles.
        """
        if not self.supervisors:
            return
        self.supervisors[which % len(self.supervisors)].log.follow()
        store = {**self.model.config["store"], "keep_last": 1 + value}
        given = {"train": {"learning_rate": value}, "store": store}.get(key, value)
        self.act(self.supervisors, which, lambda supervisor: supervisor.change(**{key: given}))
        for role in ("learner", "scheduler") if again else ():
            self.claim(role, -1)

    @rule(ahead=st.integers(0, 2), rounds=st.integers(1, 3))
    def train(self, ahead: int, rounds: int) -> None:
        """Train some versions without a fault: the newest actors read the whole log before each step."""
        for what in [*["commit"] * ahead, *["commit", "publish"] * rounds]:
            self.work([("publish" if self.model.latest < 0 else what, -1, True, 1)])

    @rule(fault=st.lists(st.sampled_from(["before", "after", "killed before", "killed after"]), max_size=2))
    def fail(self, fault: list[str]) -> None:
        """Set the faults of the next writes of an entry."""
        Lossy.faults.clear()
        Lossy.faults.extend(fault)

    @rule(which=st.integers(0, 8))
    def follow(self, which: int) -> None:
        if self.actors:
            actor = self.actors[which % len(self.actors)]
            actor.log.follow()
            assert same(actor.log.state, self.states[-1])
            newest = self.model.claims.get(actor.writer.role, {}).get("n")
            assert actor.writer.valid() == (actor.writer.claim == newest)

    # --- work of roles ----------------------------------------------------------------------------------------

    @rule(
        work=st.lists(
            st.tuples(
                st.sampled_from(["dispatch", "commit", "commit", "publish", "publish", "void", "prune", "epoch"]),
                st.sampled_from([-1, -1, -1, 0, 1]),
                st.sampled_from([True, True, False]),
                st.integers(0, 8),
            ),
            min_size=3,
            max_size=8,
        )
    )
    def work(self, work: list[tuple[str, int, bool, int]]) -> None:
        """Let actors work. Each actor has read the log just before (`fresh`) or some steps ago."""
        for what, which, fresh, drawn in work:
            is_scheduling = what in ("dispatch", "commit", "epoch")
            actors: list[Any] = self.schedulers if is_scheduling else self.learners
            if not actors:
                self.claim("scheduler" if is_scheduling else "learner", -1)
            elif fresh:
                actors[which % len(actors)].log.follow()
            if actors:
                self.act(actors, which, partial(getattr(self, what), drawn=drawn))

    def dispatch(self, scheduler: Scheduler, drawn: int) -> None:
        """Issue groups under the newest version that the scheduler knows, and discard some running groups."""
        if scheduler.log.state.version < 0:
            return
        for _ in range(1 + drawn % 4):
            scheduler.dispatch(scheduler.log.state.version)
        for step in range(drawn, drawn + drawn % 4):
            if scheduler.running:
                reason = list(DiscardReason)[step % len(DiscardReason)]
                scheduler.discard(step % len(scheduler.running), reason, 5 * (step % 2))

    def epoch(self, scheduler: Scheduler, drawn: int) -> Entry | None:
        """Start the next epoch of the source that skips solved questions, if the run has one."""
        return scheduler.start_epoch(1, drawn % 5) if scheduler.log.state.epochs else None

    def commit(self, scheduler: Scheduler, drawn: int) -> Entry | None:
        """Commit a batch whose number is, in most cases, not too far ahead of the policy version."""
        state = scheduler.log.state
        if state.version < 0 or (drawn and scheduler.next > state.version + state.alpha):
            return None
        return scheduler.commit(drawn)

    def publish(self, learner: Learner, drawn: int) -> Entry | None:
        """Publish a version if its batch waits in the state that the learner has read, which may be an old state."""
        state = learner.log.state
        return learner.publish() if state.version < 0 or state.version in state.waiting else None

    def void(self, learner: Learner, drawn: int) -> Entry | None:
        """Void any batch that waits in the learner's state, not only the next batch."""
        waiting = list(learner.log.state.waiting)
        cause: Any = "not-finite" if drawn % 2 else "damaged"
        return learner.void(waiting[drawn % len(waiting)], cause) if waiting else None

    def prune(self, learner: Learner, drawn: int) -> Entry | None:
        """Prune some objects that no version needs; in a few cases, prune no object."""
        return learner.prune(drawn) if learner.log.state.releasable or not drawn else None

    # --- entries that no role would write ---------------------------------------------------------------------

    @rule(data=st.data(), times=st.integers(1, 5))
    def draw(self, data: st.DataObject, times: int) -> None:
        """Draw entries that differ slightly from legal entries; check that the log's rules and the model accept the
        same entries.
        """
        state = self.states[-1]
        before = snapshots.to_bytes(state)
        for _ in range(times):
            role, claim, body = data.draw(st.sampled_from(list(legal(self.model))))
            for _ in range(data.draw(st.sampled_from([0, 1, 1, 2]))):
                role, claim, body = changed(data.draw, self.model, role, claim, body)
            why, said = self.model.why_not(role, claim, body), refusal(state, role, claim, body)
            assert bool(why) == bool(said), f"{body}: the model says {why!r}, the fold {said!r}"
        assert snapshots.to_bytes(state) == before

    # --- the whole log ----------------------------------------------------------------------------------------

    @rule()
    def whole(self) -> None:
        """Check the whole log. The state must be the same if it is computed from entry 0, from a snapshot, or by
        following the log.
        """
        for actor in self.actors:
            actor.log.follow()
            actor.log.settle()
        bare = MemoryStore(uuid.uuid4().hex)
        for prefix in ("log", "log_index"):
            for path in self.store.list(prefix):
                bare.put(path, self.store.get(path))
        for state in (Log(bare).state, Log(self.store).state, *(actor.log.state for actor in self.actors)):
            assert same(state, self.states[-1])
        for state, entry in zip(self.states[1:], self.model.entries, strict=True):
            assert (state.version, state.next_batch) == (entry["version"], entry["batch"])
        self.model.check_story()


Run.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)
TestRun = pytest.mark.many(Run.TestCase)


def refusal(state: RunState, role: Role, claim: int, body: Json) -> str:
    """Return why the log's rules refuse an entry; return "" if they accept the entry."""
    try:
        decide(state, state.n + 1, role, claim, BODY.validate_python(body))
    except EntryRefused as error:
        return str(error)
    return ""
