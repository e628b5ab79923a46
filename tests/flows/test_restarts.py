"""Tests the state machine of restarts with random sequences of deaths, hangs, slow starts and takeovers."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollflow.flows.keepalive import restart_history as spent_module
from rollflow.flows.keepalive.restart_history import RestartHistory, count_restarts, reset_budgets
from rollflow.flows.keepalive.restarts import LONGEST_PAUSE, RestartBudget, Restarts, RestartsExhausted, pause_after
from rollflow.storage.errors import Unreachable
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.run_records.recoveries import Recovery, RecoveryLog, recovery_path
from rollflow.tasks.run.config import RecoveryConfig
from tests.support.waiting import HANG_SECONDS, until

ROLE = "learner"
LIMITS = RecoveryConfig(restarts=3, window_seconds=100.0, backoff_seconds=1.0)
EVENTS = st.lists(
    st.tuples(st.sampled_from(["end", "look", "recover", "takeover"]), st.sampled_from([0.0, 0.5, 3.0, 20.0, 101.0])),
    max_size=60,
)


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """Let keepers wait long for the records of earlier restarts, so that the records are read on a busy machine,
    too.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spent_module, "WAIT_SECONDS", HANG_SECONDS)
        yield


def restarts_of(recovery: Recovery) -> int:
    """Return the number of restarts of a recovery."""
    return len(recovery.reason.split("; then "))


@dataclass
class World:
    """A component of a run (role), the keepers that restart it one after another, and their common clock."""

    now: float = 1_000_000.0
    run: MemoryStore = field(default_factory=lambda: MemoryStore(uuid.uuid4().hex))
    up: bool = True
    progress: float = 0.0
    ends: list[float] = field(default_factory=list)  # the times of deaths that were followed by a restart
    counted: list[float] = field(default_factory=list)  # death times that the present keeper knows
    recoveries: list[Recovery] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.journal = RecoveryLog(self.run)
        self.take_over()

    def take_over(self) -> None:
        """Let another process keep the role from now on."""
        earlier = RestartHistory(self.run, LIMITS.window_seconds, lambda: self.now, lambda: self.now)
        self.counted = [at for one in self.recoveries for at in one.restarts]
        self.keeper = Restarts(RestartBudget(LIMITS, lambda: self.now, earlier), lambda: self.now, lambda: self.now)

    @property
    def recent(self) -> int:
        return sum(self.now - at < LIMITS.window_seconds for at in self.counted)

    def end(self) -> None:
        """Mark the role as dead; a hang and a slow start have the same effect."""
        left = LIMITS.restarts - self.recent
        outage = self.keeper.mark_down(ROLE, "gone", "a step", 2)
        assert left > 0, "more restarts than the budget has"
        assert sum(self.now - at < LIMITS.window_seconds for at in self.ends) < LIMITS.restarts
        assert outage.pause == (2.0 ** (self.recent - 1) if self.recent else 0.0) <= LONGEST_PAUSE
        assert self.keeper.may_start(ROLE) == (outage.pause == 0)
        self.ends.append(self.now)
        self.counted.append(self.now)
        self.up = False

    def recover(self) -> None:
        """Advance the clock past the pause, and let the role start and make progress."""
        if outage := self.keeper.outage(ROLE):
            self.now = max(self.now, outage.due)
        while not self.up:
            self.look()

    def look(self) -> None:
        """Let the keeper check the role once, as it does regularly."""
        outage = self.keeper.outage(ROLE)
        if outage is None:
            return
        if outage.launched is None:
            if self.keeper.may_start(ROLE):
                self.keeper.mark_launched(ROLE)
            else:
                assert self.now < outage.due <= self.now + LONGEST_PAUSE
            return
        recovery = self.keeper.note_progress(ROLE, self.progress)
        self.progress += 1.0
        if recovery:
            self.up = True
            self.recoveries.append(recovery)
            self.journal.append(recovery)


@settings(deadline=None, max_examples=150)
@given(EVENTS)
@example([("end", 0.0)] * 3 + [("end", 101.0), ("end", 0.0), ("recover", 0.0), ("takeover", 0.0), ("end", 0.0)])
def test_random_restarts_stay_within_budget_and_are_recorded(
    events: list[tuple[str, float]],
) -> None:
    world, episodes = World(), 0
    for kind, passed in events:
        world.now += passed
        if kind == "end":
            episodes += world.up
            if world.recent == LIMITS.restarts:
                with pytest.raises(
                    RestartsExhausted, match=r"learner was restarted 3 times within 100 s, .* ended again: gone"
                ):
                    world.keeper.mark_down(ROLE, "gone")
                break
            world.end()  # below the limit on restarts, the role is always restarted
        elif kind == "look":
            world.look()
        elif kind == "recover":
            world.recover()
        elif world.up:  # a keeper that is killed during an outage leaves no record of that outage
            world.take_over()
    assert len(world.recoveries) in (episodes, episodes - 1)
    assert world.recoveries == world.journal.read()
    for one in world.recoveries:
        assert one.noticed_at <= one.restored_at <= one.resumed_at
        assert one.trajectories == 2 * restarts_of(one) == 2 * len(one.restarts)
        assert set(one.restarts) <= set(world.ends)
        assert (one.redone, one.role) == ("a step", ROLE)


def record(role: str, attempt: int, noticed: float, resumed: float, *again: float) -> Recovery:
    return Recovery(role, "gone", noticed, noticed, resumed, attempt=attempt, restarts=(noticed, *again))


def test_restarts_are_counted_for_each_role_separately() -> None:
    journal = [
        Recovery("engine-0", "gone", 10.0, 10.0, 20.0),  # an earlier release did not record the times of restarts
        record("learner", 1, 900.0, 901.0),
        record("engine-0", 4, 930.0, 940.0, 932.0, 936.0),
        record("learner", 2, 950.0, 951.0),
        record("learner", 2, 960.0, 961.0, 960.5),  # a keeper that numbered its restarts from 1 again
        record("learner", 3, 1001.0, 1002.0),  # the present keeper's own record, which is later than `until`
    ]
    found = count_restarts(journal, until=1000.0)
    assert found["learner"].times == (900.0, 950.0, 960.0, 960.5)
    assert found["learner"].attempt == 2
    assert found["engine-0"].times == (10.0, 930.0, 932.0, 936.0)
    assert found["engine-0"].attempt == 4
    assert set(found) == {"learner", "engine-0"}


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_clock_change_uses_no_restart_budget(step: float) -> None:
    now = [5000.0]
    run = MemoryStore(uuid.uuid4().hex)
    for attempt in (1, 2, 3):
        RecoveryLog(run).append(record(ROLE, attempt, 4990.0 + attempt, 4995.0))
    earlier = RestartHistory(run, 100.0, lambda: 50.0, lambda: now[0])
    assert sorted(earlier.times(ROLE)) == [41.0, 42.0, 43.0]
    now[0] += step
    assert earlier.times(ROLE) == []


def test_restart_by_the_user_resets_the_restart_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start by a user resets the count of restarts, because the user has looked at the cause. A supervisor that
    follows a dead one does not reset the count.
    """
    run = MemoryStore(uuid.uuid4().hex)
    for attempt in (1, 2, 3):
        RecoveryLog(run).append(record(ROLE, attempt, 4990.0 + attempt, 4994.0))
    monkeypatch.setattr(spent_module.time, "time", lambda: 4995.0)
    reset_budgets(run)
    RecoveryLog(run).append(record(ROLE, 1, 4996.0, 4997.0))
    budget = RestartBudget(LIMITS, lambda: 50.0, RestartHistory(run, 100.0, lambda: 50.0, lambda: 5000.0))
    for _ in range(2):
        budget.spend(ROLE, "gone")
    assert budget.attempt(ROLE) == 3
    with pytest.raises(RestartsExhausted):
        budget.spend(ROLE, "gone")


GONE = f'{{"role": "{ROLE}", "reason": "x", "restored_at": 1.0, "resumed_at": 2.0, '
DAMAGED = (
    "", "null", "[]", "{}", "[" * 100_000, "\0", GONE + '"noticed_at": "soon"}', GONE + '"noticed_at": null}',
    GONE + '"noticed_at": 995.0, "attempt": "second"}', GONE + '"noticed_at": 995.0, "restarts": 3}',
)  # fmt: skip


@pytest.mark.parametrize("damaged", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_restart_record_does_not_reset_the_limit(damaged: str) -> None:
    run = MemoryStore(uuid.uuid4().hex)
    journal = RecoveryLog(run)
    journal.append(record(ROLE, 1, 990.0, 991.0))
    run.put(recovery_path(1), damaged.encode())
    journal.append(record(ROLE, 2, 992.0, 993.0))
    assert [one.attempt for one in journal.read()] == [1, 2]
    journal.append(record(ROLE, 3, 994.0, 995.0))
    assert [one.attempt for one in journal.read()] == [1, 2, 3]
    assert journal.damaged == [recovery_path(1)]
    budget = RestartBudget(LIMITS, lambda: 1000.0, RestartHistory(run, 100.0, lambda: 1000.0, lambda: 1000.0))
    with pytest.raises(RestartsExhausted):
        budget.spend(ROLE, "gone")


def test_restart_record_of_a_later_release_is_read() -> None:
    run = MemoryStore(uuid.uuid4().hex)
    run.put(recovery_path(0), (GONE + '"noticed_at": 995, "node": "a"}').encode())
    assert [one.noticed_at for one in RecoveryLog(run).read()] == [995.0]


def test_restart_pause_is_bounded_after_many_restarts() -> None:
    limits = RecoveryConfig(restarts=10**6, backoff_seconds=1e-300)
    assert [pause_after(restarts, limits) for restarts in (0, 1, 10**6)] == [0.0, 1e-300, 1e-300 * 2.0**1000]
    assert pause_after(10**6, RecoveryConfig()) == LONGEST_PAUSE
    assert pause_after(10**6, RecoveryConfig(backoff_seconds=0.0)) == 0.0


class Hanging(MemoryStore):
    """A store that answers no read until the test releases it, and then fails once."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.go, self.failures = threading.Event(), 1

    def exists(self, path: str) -> bool:
        self.go.wait(60)
        self.failures -= 1
        if self.failures >= 0:
            raise Unreachable("object storage did not answer")
        return super().exists(path)


def test_unreachable_storage_does_not_delay_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spent_module, "WAIT_SECONDS", 0.01)
    monkeypatch.setattr(spent_module, "AGAIN_SECONDS", 0.01)
    run = Hanging(uuid.uuid4().hex)
    RecoveryLog(MemoryStore(run.name)).append(record(ROLE, 1, 990.0, 991.0))
    earlier = RestartHistory(run, 100.0, lambda: 1000.0, lambda: 1000.0)
    budget = RestartBudget(LIMITS, lambda: 1000.0, earlier)
    assert budget.spend(ROLE, "gone") == 0.0  # only the keeper's own restarts count, because the records cannot be read
    assert not run.go.is_set()
    run.go.set()
    until(lambda: earlier.attempt(ROLE) == 1)
    assert budget.spend(ROLE, "gone") == 2.0  # the third restart within the window
    with pytest.raises(RestartsExhausted):
        budget.spend(ROLE, "gone")
