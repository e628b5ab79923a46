"""Budget, pause and record of what is started again, for whoever keeps something alive.

Whatever is started again begins from storage, so a restart loses nothing that was committed. Each recovery is
written down (`storage.journal.recoveries`), logged on the flow run's page and emitted as a Prefect event.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

from rollflow.storage.errors import RollflowError
from rollflow.storage.journal.recoveries import Notes, Recovery
from rollflow.tasks.config import RecoveryConfig
from rollflow.tasks.run_context import RunContext

LONGEST_PAUSE = 60.0


class GaveUp(RollflowError):
    """What died is not started again; the message is the reason."""


class Budget:
    """Counts restarts by role. See `RecoveryConfig` for what is allowed."""

    def __init__(self, limits: RecoveryConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._spent: dict[str, list[float]] = {}
        self._attempts: Counter[str] = Counter()

    def spend(self, role: str, reason: str) -> float:
        """Take one restart of `role` out of the budget; returns the pause before it (seconds).

        Raises:
            GaveUp: the budget is used up.
        """
        now, limits = self._clock(), self._limits
        recent = [at for at in self._spent.get(role, []) if now - at < limits.window_seconds]
        if len(recent) >= limits.restarts:
            raise GaveUp(
                f"{role} was started again {len(recent)} times within {limits.window_seconds:g} s "
                f"(recovery.restarts) and ended once more: {reason}"
            )
        self._spent[role] = [*recent, now]
        self._attempts[role] += 1
        return min(LONGEST_PAUSE, limits.backoff_seconds * 2 ** (len(recent) - 1)) if recent else 0.0

    def attempt(self, role: str) -> int:
        """How often `role` was started again, within the window and before it."""
        return self._attempts[role]


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

    @property
    def _now(self) -> float:
        return self.noticed_at + time.monotonic() - self.noticed

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
        more = self.trajectories + other.trajectories
        reason = f"{other.reason}; then {self.reason}"
        return replace(self, reason=reason, noticed_at=other.noticed_at, noticed=other.noticed, trajectories=more)

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
        )


class RecoveryReporter:
    """Where recoveries are written down: storage, the flow run's log, Prefect's events; it holds up nobody."""

    def __init__(self, context: RunContext, log: Callable[[str], None]) -> None:
        self._log, self.notes = log, Notes(context.store)

    def noticed(self, pending: Pending) -> None:
        """Something died and is started again."""
        self._log(f"{pending.role} is started again (restart {pending.attempt}): {pending.reason}")

    def write(self, recovery: Recovery) -> None:
        """A recovery is complete."""
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
