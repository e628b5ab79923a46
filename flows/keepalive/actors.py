"""How an actor is kept alive: watched for life and progress, started again from storage, within a budget.

    start --> watch --ended--> result
      ^         |
      |         | died, stuck (`keepalive.vitals`), no progress, or raised
      +-- pause-+          (over the budget: `GaveUp` with the reason)

Budget, pause and record are those of `keepalive.restarts`. Once no supervisor watches the run any more
(`tasks.actors.lease`), nothing is started again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rollflow.flows.keepalive.restarts import GaveUp, RecoveryReporter, Restarts, first_line
from rollflow.flows.keepalive.vitals import Vitals
from rollflow.flows.services import cluster
from rollflow.flows.views.log_lines import about
from rollflow.storage.errors import ConfigError, NotFinite, RollflowError, StoreFailed
from rollflow.storage.log.state import Superseded
from rollflow.tasks.actors.lease import Lease, LeaseWatch
from rollflow.tasks.actors.statuses import ActorStatus
from rollflow.tasks.run.context import RunContext

POLL_SECONDS = 0.5
CALM_SECONDS = 2.0
Status = TypeVar("Status", bound=ActorStatus)


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


class Unwatched(RollflowError):
    """No supervisor has watched the run for `cluster.lease_seconds`: nobody would end what is started again."""


class ActorKeeper(Generic[Status]):
    """Keeps one actor alive until its `run` returns. See the module's docstring."""

    def __init__(self, context: RunContext, watched: WatchedActor[Status], log: Callable[[str], None]) -> None:
        self.context, self.watched = context, watched
        self.restarts = Restarts.of_run(context)
        self.reporter = RecoveryReporter(context, log)
        self._answer = context.config.recovery.answer_seconds
        self._lease = LeaseWatch(Lease.of(context))
        self._last: Status | None = None
        self._changed = 0.0  # monotonic time of its last progress
        about(run=context.run_id, actor=watched.name)

    def run(self, tick: Callable[[Any, Status], None] = lambda actor, status: None) -> Any:
        """The result of the actor's `run`; `tick` is called with the actor and its status at every look."""
        try:
            while True:
                try:
                    about(attempt=self.restarts.budget.attempt(self.watched.name) + 1)
                    actor = self.watched.start()
                    self.restarts.launched(self.watched.name)
                    return self._watch(actor, tick)
                except (ConfigError, NotFinite, StoreFailed, GaveUp, Superseded, Unwatched):
                    raise  # a person must act first, or another supervisor does
                except Exception as error:  # noqa: BLE001 - the supervisor: whatever ended it, it is started again
                    self._again(first_line(error))
        finally:
            self.reporter.notes.flush()

    def _watch(self, actor: Any, tick: Callable[[Any, Status], None]) -> Any:
        running, vitals = actor.run.remote(), Vitals(self.watched.name, actor, self._answer)
        self._changed, before, name = time.monotonic(), None, self.watched.name
        poll = 0.0  # the first look is at once: engines wait for it
        while not cluster.done(running, poll):
            poll = POLL_SECONDS if self.restarts.outage(name) else self.watched.poll
            status = self._status(actor, vitals)
            self._last = status
            about(version=status.progress.get("version"))
            self.reporter.write(self.restarts.seen(name, status.made))
            # A stage that waits for another by design says so; that other one's flow watches it.
            if status.progress != before or status.waits_for:
                self._changed, before = time.monotonic(), status.progress
            self._check_progress()
            self._check_lease()
            tick(actor, status)
        result = cluster.call(running, self._answer, name)
        self.reporter.write(self.restarts.back(name))
        return result

    def _status(self, actor: Any, vitals: Vitals) -> Status:
        """Return the actor's status; if it does not answer, wait for as long as it starts or computes."""
        asked = actor.status.remote()
        while not cluster.done(asked, POLL_SECONDS):
            if vitals.is_starting():
                self._changed = time.monotonic()
            self._check_progress()
        status: Status = cluster.call(asked, self._answer, f"the status of {self.watched.name}")
        vitals.note_answer()
        return status

    def _check_progress(self) -> None:
        if time.monotonic() - self._changed > self.watched.patience:
            last = self._last.progress if self._last else None
            raise RollflowError(f"no progress for {self.watched.patience:g} s; last seen: {last}")

    def _check_lease(self) -> None:
        if self._lease.has_expired():
            raise Unwatched(self._lease.lease.sentence)

    def _again(self, reason: str) -> None:
        """Make sure of its end, and wait as long as the budget says."""
        redone, trajectories = self.watched.redone(self._last) if self._last else ("its start", 0)
        outage = self.restarts.down(self.watched.name, reason, redone, trajectories)
        self._last = None
        self.reporter.noticed(outage)
        cluster.kill_named([self.watched.name])
        time.sleep(outage.pause)
