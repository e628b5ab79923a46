"""Limits how often a component of a run (actor, engine, Prefect flow or service) is restarted, sets the pause before a
restart, and records the recoveries. Other modules of this package watch and restart the components. A restarted
component continues from the run's storage, so a restart loses nothing that was committed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

from rollflow.flows.keepalive.restart_history import RestartHistory
from rollflow.storage.errors import RollflowError
from rollflow.storage.run_records.recoveries import Notes, Recovery
from rollflow.tasks.run.config import RecoveryConfig
from rollflow.tasks.run.context import RunContext

LONGEST_PAUSE = 60.0


class RestartsExhausted(RollflowError):
    """Raised if a component of a run must not be restarted again. The error's message is the reason."""


def pause_after(restarts: int, limits: RecoveryConfig) -> float:
    """Return the pause in seconds before the next restart of a component, if the component was restarted `restarts`
    times within the time window.
    """
    doublings = min(restarts - 1, 1000)  # A larger exponent would overflow a float.
    return min(LONGEST_PAUSE, limits.backoff_seconds * 2.0**doublings) if restarts else 0.0


class RestartBudget:
    """Counts the restarts of each component, such as an engine, within a time window. `RecoveryConfig` has the largest
    number of restarts and the length of the time window.
    """

    def __init__(
        self, limits: RecoveryConfig, clock: Callable[[], float] = time.monotonic, earlier: RestartHistory | None = None
    ) -> None:
        """Create a counter of restarts. The restarts in the history `earlier` are counted as well."""
        self._limits, self._clock, self._earlier = limits, clock, earlier
        self._spent: dict[str, list[float]] = {}
        self._attempts: Counter[str] = Counter()

    def spend(self, role: str, reason: str) -> float:
        """Count one restart of the component `role`, and return the pause in seconds before the restart.

        Raises:
            RestartsExhausted: the component was already restarted too often.
        """
        now, limits = self._clock(), self._limits
        own = [at for at in self._spent.get(role, []) if now - at < limits.window_seconds]
        before = self._earlier.times(role) if self._earlier else []
        recent = len(own) + sum(now - at < limits.window_seconds for at in before)
        if recent >= limits.restarts:
            raise RestartsExhausted(
                f"{role} was restarted {recent} times within {limits.window_seconds:g} s, the limit of "
                f"recovery.restarts, and ended again: {reason}"
            )
        self._spent[role] = [*own, now]
        self._attempts[role] += 1
        return pause_after(recent, limits)

    def attempt(self, role: str) -> int:
        """Return how often the component `role` was restarted, including restarts before the time window."""
        return self._attempts[role] + (self._earlier.attempt(role) if self._earlier else 0)


@dataclass
class PendingRecovery:
    """The recovery of a failed component that is not finished yet. A recovery has three events: the failure is noticed,
    the component is restored, and the component continues its work.

    Only the time `noticed_at`, when the failure was noticed, is read from the wall clock. Every later time is
    `noticed_at` plus the time that has passed on `clock`.
    """

    role: str
    reason: str
    attempt: int
    redone: str = "nothing"
    trajectories: int = 0
    noticed_at: float = field(default_factory=time.time)
    restored_at: float | None = None
    baseline: float = 0.0
    noticed: float = field(default_factory=time.monotonic)
    clock: Callable[[], float] = time.monotonic  # The clock from which the time `noticed` was read.
    # Times, in seconds since the epoch, of earlier failures that are part of the same recovery.
    earlier: tuple[float, ...] = ()

    @property
    def _now(self) -> float:
        return self.noticed_at + self.clock() - self.noticed

    def note_progress(self, progress: float) -> bool:
        """Record the progress of the restarted component. Return True once the component has made progress since its
        first answer.
        """
        if self.restored_at is None:
            self.restored_at, self.baseline = self._now, progress
            return False
        return progress > self.baseline

    def after(self, other: PendingRecovery | None) -> PendingRecovery:
        """Return this recovery merged with `other`, an earlier recovery of the same component that was not finished."""
        if other is None:
            return self
        reason, more = f"{other.reason}; then {self.reason}", self.trajectories + other.trajectories
        again = (*other.earlier, other.noticed_at + self.noticed - other.noticed)
        return replace(
            self, reason=reason, noticed_at=other.noticed_at, noticed=other.noticed, trajectories=more, earlier=again
        )

    def finish_recovery(self) -> Recovery:
        """Return the finished recovery. The current time is recorded as the time at which the component continued its
        work.
        """
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
    """A component of a run that has failed and does not work yet, with the times of its restart. `due` is the earliest
    time for the restart of the component, and `launched` is the time at which it was restarted.
    """

    pending: PendingRecovery
    reason: str  # Reason of the component's newest failure.
    pause: float  # Seconds between the failure of the component and its restart.
    due: float  # monotonic time
    launched: float | None = None  # monotonic time


class Restarts:
    """The components of a run that have failed, and their recoveries."""

    def __init__(
        self, budget: RestartBudget, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        """Start with all components working. `clock` gives the times for measuring waits, and `wall` gives the times
        that are written into recovery records.
        """
        self.budget, self._clock, self._wall = budget, clock, wall
        self._outages: dict[str, Outage] = {}

    @classmethod
    def of_run(cls, context: RunContext) -> Restarts:
        """Build the `Restarts` of a run. Restarts that earlier processes made count against the run's limit."""
        limits = context.config.recovery
        return cls(RestartBudget(limits, earlier=RestartHistory(context.store, limits.window_seconds)))

    def outage(self, role: str) -> Outage | None:
        """Return the outage of the component `role`, or None if the component works."""
        return self._outages.get(role)

    def mark_down(self, role: str, reason: str, redone: str = "nothing", trajectories: int = 0) -> Outage:
        """Record that the component `role` has died, or that the component must be stopped and restarted.

        Raises:
            RestartsExhausted: the component was restarted too often.
        """
        pause, now, known = self.budget.spend(role, reason), self._clock(), self._outages.get(role)
        attempt, at = self.budget.attempt(role), self._wall()
        pending = PendingRecovery(role, reason, attempt, redone, trajectories, at, noticed=now, clock=self._clock)
        outage = Outage(pending.after(known.pending if known else None), reason, pause, now + pause)
        self._outages[role] = outage
        return outage

    def may_start(self, role: str) -> bool:
        """Return whether the component `role` may be started, which is true once the pause after its failure is
        over.
        """
        outage = self._outages.get(role)
        return outage is None or self._clock() >= outage.due

    def mark_launched(self, role: str) -> None:
        """Record that the component `role` was started or restarted."""
        if outage := self._outages.get(role):
            outage.launched = self._clock()

    def note_progress(self, role: str, progress: float) -> Recovery | None:
        """Record the progress of the component `role`. If the progress completes the recovery of the component, return
        the recovery.
        """
        outage = self._outages.get(role)
        return self.mark_up(role) if outage and outage.pending.note_progress(progress) else None

    def mark_up(self, role: str) -> Recovery | None:
        """Record that the component `role` works. If the component had failed, return its recovery."""
        outage = self._outages.pop(role, None)
        return outage.pending.finish_recovery() if outage else None


class RecoveryReporter:
    """Reports recoveries of failed components to the run's storage, to the Prefect flow run's log and to Prefect's
    events, without blocking the caller.
    """

    def __init__(self, context: RunContext, log: Callable[[str], None]) -> None:
        self._log, self.notes = log, Notes(context.store)

    def report_restart(self, outage: Outage) -> None:
        """Log that a failed component is restarted, with the reason."""
        self._log(f"{outage.pending.role} is restarted (restart {outage.pending.attempt}): {outage.reason}")

    def report_recovery(self, recovery: Recovery | None) -> None:
        """Report a finished recovery of a component; do nothing if `recovery` is None."""
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
    """Return the first line of an error's message. If the error has a `cause` (an error that a Ray actor raised), use
    the message of the cause.
    """
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return f"{type(cause).__name__}: {first_line(cause)}"
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
