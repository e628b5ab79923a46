"""How an actor is kept alive: watched for life and progress, started again from storage, within a budget.

    start --> watch --ended--> result
      ^         |
      |         | died, silent, no progress, or raised
      +-- pause-+          (over the budget: `GaveUp` with the reason)

Whatever is started again begins from storage, so a restart loses nothing that was committed. Each recovery is
written down (`storage.journal.recoveries`), logged on the flow run's page and emitted as a Prefect event.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from rollflow.flows.services import cluster
from rollflow.storage.errors import ConfigError, RollflowError, StoreFailed
from rollflow.storage.journal.recoveries import Notes, Recovery
from rollflow.storage.log.state import Superseded
from rollflow.tasks.actors.statuses import ActorStatus
from rollflow.tasks.config import RecoveryConfig, RunConfig
from rollflow.tasks.run_context import RunContext

POLL_SECONDS = 0.5
CALM_SECONDS = 2.0
LONGEST_PAUSE = 60.0
Status = TypeVar("Status", bound=ActorStatus)


class GaveUp(RollflowError):
    """A stage ended with an error; the message is the reason."""


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
        from dataclasses import asdict

        from prefect.events import emit_event
        from prefect.runtime import flow_run

        self.notes.add(recovery)
        self._log(f"recovered {recovery.sentence()}")
        if flow_run.id:
            resource = {"prefect.resource.id": f"prefect.flow-run.{flow_run.id}"}
            emit_event(event="rollflow.recovery", resource=resource, payload=asdict(recovery))


@dataclass(frozen=True)
class WatchedActor(Generic[Status]):
    """An actor to keep alive, by its name in the run's namespace.

    `start` starts it or finds it; `redone` says of a status what its successor has to do again, in words and in
    trajectories; `patience` is the longest time without any progress in its status (seconds). It is asked for every
    `poll` seconds, after a restart more often; a death ends the wait.
    """

    name: str
    start: Callable[[], Any]
    redone: Callable[[Status], tuple[str, int]]
    patience: float
    poll: float = CALM_SECONDS


class ActorKeeper(Generic[Status]):
    """Keeps one actor alive until its `run` returns. See the module's docstring."""

    def __init__(self, context: RunContext, watched: WatchedActor[Status], log: Callable[[str], None]) -> None:
        self.context, self.watched = context, watched
        self.budget = Budget(context.config.recovery)
        self.reporter = RecoveryReporter(context, log)
        self._answer = context.config.recovery.answer_seconds
        self._last: Status | None = None
        self._pending: Pending | None = None

    def run(self, tick: Callable[[Any, Status], None] = lambda actor, status: None) -> Any:
        """The result of the actor's `run`; `tick` is called with the actor and its status at every look."""
        try:
            while True:
                try:
                    return self._watch(self.watched.start(), tick)
                except (ConfigError, StoreFailed, GaveUp, Superseded):
                    raise  # a person must act first, or another supervisor does
                except Exception as error:  # noqa: BLE001 - the supervisor: whatever ended it, it is started again
                    self._again(first_line(error))
        finally:
            self.reporter.notes.flush()

    def _watch(self, actor: Any, tick: Callable[[Any, Status], None]) -> Any:
        running = actor.run.remote()
        changed, before = time.monotonic(), None
        while not cluster.done(running, POLL_SECONDS if self._pending else self.watched.poll):
            status: Status = cluster.call(actor.status.remote(), self._answer, f"the status of {self.watched.name}")
            self._last = status
            self._resumed(status)
            # A stage that waits for another by design says so; that other one's flow watches it.
            if status.progress != before or status.waits_for:
                changed, before = time.monotonic(), status.progress
            if time.monotonic() - changed > self.watched.patience:
                raise RollflowError(f"no progress for {self.watched.patience:g} s; last seen: {before}")
            tick(actor, status)
        result = cluster.call(running, self._answer, self.watched.name)
        if self._pending:
            self._write(self._pending.done())
        return result

    def _resumed(self, status: Status) -> None:
        if self._pending and self._pending.seen(status.made):
            self._write(self._pending.done())

    def _write(self, recovery: Recovery) -> None:
        self._pending = None
        self.reporter.write(recovery)

    def _again(self, reason: str) -> None:
        """Make sure of its end, and wait as long as the budget says."""
        pause = self.budget.spend(self.watched.name, reason)
        redone, trajectories = self.watched.redone(self._last) if self._last else ("its start", 0)
        pending = Pending(self.watched.name, reason, self.budget.attempt(self.watched.name), redone, trajectories)
        self._pending, self._last = pending.after(self._pending), None
        self.reporter.noticed(pending)
        cluster.kill_named([self.watched.name])
        time.sleep(pause)


def gpu_share(config: RunConfig) -> float:
    """GPUs for each engine and the learner: a whole one where there are enough, else equal shares; 0 on CPU.

    An engine for evaluations alone counts as one where it is like the others.
    """
    gpus = cluster.gpus()
    alike = config.evaluation_engine(on_cpu=not gpus) == config.engine
    workers = config.engine.replicas + 1 + alike
    return min(1.0, 1 / math.ceil(workers / gpus)) if gpus else 0.0


def first_line(error: BaseException) -> str:
    """An error's first line: what a person should read of it; of one that an actor raised, its cause's."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return f"{type(cause).__name__}: {first_line(cause)}"
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
