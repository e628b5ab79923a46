"""What all keepers share: who is down, when a successor may be started, and what is on record of it.

    up --down()--> waits for its pause --launched()--> starts --seen(), back()--> up, and one `Recovery`
                      ^                                  |
                      +---------- down() again ----------+      over the budget: `GaveUp` with the reason

- No role is started again more often within the window than its budget says; until then, each time it goes down.
- The budget outlives the process that spends it: what an earlier keeper spent is told by the run's recoveries, see
  `keepalive.spent`.
- One end after another, before there was any progress, is one recovery.

`Restarts` only decides. Who watches, starts and asks: `keepalive`'s actors, engines, stages and services. Whatever is
started again begins from storage, so a restart loses nothing that was committed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

from rollflow.flows.keepalive.restart_history import Earlier
from rollflow.storage.errors import RollflowError
from rollflow.storage.run_records.recoveries import Notes, Recovery
from rollflow.tasks.run.config import RecoveryConfig
from rollflow.tasks.run.context import RunContext

LONGEST_PAUSE = 60.0


class GaveUp(RollflowError):
    """What died is not started again; the message is the reason."""


def pause_after(restarts: int, limits: RecoveryConfig) -> float:
    """Seconds to wait before one more start, after so many within the window."""
    doublings = min(restarts - 1, 1000)  # a float has no more
    return min(LONGEST_PAUSE, limits.backoff_seconds * 2.0**doublings) if restarts else 0.0


class Budget:
    """Counts restarts by role. See `RecoveryConfig` for what is allowed."""

    def __init__(
        self, limits: RecoveryConfig, clock: Callable[[], float] = time.monotonic, earlier: Earlier | None = None
    ) -> None:
        """`earlier`: what was spent before this process."""
        self._limits, self._clock, self._earlier = limits, clock, earlier
        self._spent: dict[str, list[float]] = {}
        self._attempts: Counter[str] = Counter()

    def spend(self, role: str, reason: str) -> float:
        """Take one restart of `role` out of the budget; returns the pause before it (seconds).

        Raises:
            GaveUp: the budget is used up.
        """
        now, limits = self._clock(), self._limits
        own = [at for at in self._spent.get(role, []) if now - at < limits.window_seconds]
        before = self._earlier.times(role) if self._earlier else []
        recent = len(own) + sum(now - at < limits.window_seconds for at in before)
        if recent >= limits.restarts:
            raise GaveUp(
                f"{role} was started again {recent} times within {limits.window_seconds:g} s "
                f"(recovery.restarts) and ended once more: {reason}"
            )
        self._spent[role] = [*own, now]
        self._attempts[role] += 1
        return pause_after(recent, limits)

    def attempt(self, role: str) -> int:
        """How often `role` was started again, within the window and before it."""
        return self._attempts[role] + (self._earlier.attempt(role) if self._earlier else 0)


@dataclass
class Pending:
    """A recovery under way: noticed, later restored, later resumed. Only the first is read off the wall clock."""

    role: str
    reason: str
    attempt: int
    redone: str = "nothing"
    trajectories: int = 0
    noticed_at: float = field(default_factory=time.time)
    restored_at: float | None = None
    baseline: float = 0.0
    noticed: float = field(default_factory=time.monotonic)
    clock: Callable[[], float] = time.monotonic  # of `noticed`
    earlier: tuple[float, ...] = ()  # when it was noticed that its successors before the last one had died

    @property
    def _now(self) -> float:
        return self.noticed_at + self.clock() - self.noticed

    def seen(self, progress: float) -> bool:
        """Take note of the successor's progress; true once there is some."""
        if self.restored_at is None:
            self.restored_at, self.baseline = self._now, progress
            return False
        return progress > self.baseline

    def after(self, other: Pending | None) -> Pending:
        """This one as part of a recovery that was under way already: its successor died before it made progress."""
        if other is None:
            return self
        reason, more = f"{other.reason}; then {self.reason}", self.trajectories + other.trajectories
        again = (*other.earlier, other.noticed_at + self.noticed - other.noticed)
        return replace(
            self, reason=reason, noticed_at=other.noticed_at, noticed=other.noticed, trajectories=more, earlier=again
        )

    def done(self) -> Recovery:
        """The recovery, resumed now."""
        now = self._now
        return Recovery(
            role=self.role,
            reason=self.reason,
            noticed_at=self.noticed_at,
            restored_at=self.restored_at or now,
            resumed_at=now,
            redone=self.redone,
            trajectories=self.trajectories,
            attempt=self.attempt,
            restarts=(self.noticed_at, *self.earlier),
        )


@dataclass
class Outage:
    """A role that is down. It may be started again from `due` on; `launched`: since when its successor starts."""

    pending: Pending
    reason: str  # of its last end
    pause: float  # seconds
    due: float  # monotonic
    launched: float | None = None  # monotonic


class Restarts:
    """Who is down, by role. See the module's docstring."""

    def __init__(
        self, budget: Budget, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        """`clock` is what is waited by, `wall` what is written down."""
        self.budget, self._clock, self._wall = budget, clock, wall
        self._outages: dict[str, Outage] = {}

    @classmethod
    def of_run(cls, context: RunContext) -> Restarts:
        """With what the run's keepers before this process have left of the budget."""
        limits = context.config.recovery
        return cls(Budget(limits, earlier=Earlier(context.store, limits.window_seconds)))

    def outage(self, role: str) -> Outage | None:
        """What is known of a role that is down; None: it is up."""
        return self._outages.get(role)

    def down(self, role: str, reason: str, redone: str = "nothing", trajectories: int = 0) -> Outage:
        """It has ended, or must be ended: what of its work is done again, in words and in trajectories.

        Raises:
            GaveUp: its budget is used up.
        """
        pause, now, known = self.budget.spend(role, reason), self._clock(), self._outages.get(role)
        attempt, at = self.budget.attempt(role), self._wall()
        pending = Pending(role, reason, attempt, redone, trajectories, at, noticed=now, clock=self._clock)
        outage = Outage(pending.after(known.pending if known else None), reason, pause, now + pause)
        self._outages[role] = outage
        return outage

    def may_start(self, role: str) -> bool:
        """Whether it may be started now, as far as its pause goes."""
        outage = self._outages.get(role)
        return outage is None or self._clock() >= outage.due

    def launched(self, role: str) -> None:
        """It was started, for the first time or again."""
        if outage := self._outages.get(role):
            outage.launched = self._clock()

    def seen(self, role: str, progress: float) -> Recovery | None:
        """Its successor answers, and says how much it has made; the recovery, if that is complete with it."""
        outage = self._outages.get(role)
        return self.back(role) if outage and outage.pending.seen(progress) else None

    def back(self, role: str) -> Recovery | None:
        """It does its work; the recovery, if it was down."""
        outage = self._outages.pop(role, None)
        return outage.pending.done() if outage else None


class RecoveryReporter:
    """Where recoveries are written down: storage, the flow run's log, Prefect's events; it holds up nobody."""

    def __init__(self, context: RunContext, log: Callable[[str], None]) -> None:
        self._log, self.notes = log, Notes(context.store)

    def noticed(self, outage: Outage) -> None:
        """Something died and is started again."""
        self._log(f"{outage.pending.role} is started again (restart {outage.pending.attempt}): {outage.reason}")

    def write(self, recovery: Recovery | None) -> None:
        """A recovery is complete; None: there was none."""
        if recovery is None:
            return
        from prefect.events import emit_event
        from prefect.runtime import flow_run

        self.notes.add(recovery)
        self._log(f"recovered {recovery.sentence()}")
        if flow_run.id:
            resource = {"prefect.resource.id": f"prefect.flow-run.{flow_run.id}"}
            emit_event(event="rollflow.recovery", resource=resource, payload=asdict(recovery))


def first_line(error: BaseException) -> str:
    """An error's first line: what a person should read of it; of one that an actor raised, its cause's."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return f"{type(cause).__name__}: {first_line(cause)}"
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
