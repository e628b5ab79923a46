"""Keeps one Ray actor alive: checks whether the actor lives and makes progress, and restarts it from storage. The
number of restarts of an actor is limited.

    start --> watch --ended--> result
      ^         |
      |         | died, stuck (`keepalive.vitals`), no progress, or raised
      +-- pause-+          (over the budget: `RestartsExhausted` with the reason)

The module `keepalive.restarts` limits the number of restarts, sets the pause before each restart, and records it. If no
supervisor watches the run (`tasks.actors.lease`), nothing is restarted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rollflow.flows.keepalive.restarts import RecoveryReporter, Restarts, RestartsExhausted, first_line
from rollflow.flows.keepalive.vitals import Vitals
from rollflow.flows.ray_cluster import cluster
from rollflow.flows.views.log_lines import set_log_facts
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
    """A Ray actor that an `ActorKeeper` watches and restarts. The `name` of a watched Ray actor is unique in the run.

    `start` creates the Ray actor, or returns the actor if it exists already. If an actor died after reporting `status`,
    `redone(status)` describes the work that the restarted actor must repeat. `patience` is the longest time in seconds
    for which the actor's status may stay unchanged before the actor is restarted. `poll` is the number of seconds
    between two status calls to the actor. After a restart, the status of the actor is read every `POLL_SECONDS`.
    """

    name: str
    start: Callable[[], Any]
    redone: Callable[[Status], tuple[str, int]]
    patience: float
    poll: float = CALM_SECONDS


class SupervisorGone(RollflowError):
    """Raised if no supervisor process has watched the run for `cluster.lease_seconds`. Without a supervisor, no process
    would stop a restarted actor.
    """


class ActorKeeper(Generic[Status]):
    """Keeps one Ray actor alive until the actor's `run` method returns."""

    def __init__(self, context: RunContext, watched: WatchedActor[Status], log: Callable[[str], None]) -> None:
        self.context, self.watched = context, watched
        self.restarts = Restarts.of_run(context)
        self.reporter = RecoveryReporter(context, log)
        self._answer = context.config.recovery.answer_seconds
        self._lease = LeaseWatch(Lease.of(context))
        self._last: Status | None = None
        self._changed = 0.0  # Monotonic time of the last change in the actor's progress.
        set_log_facts(run=context.run_id, actor=watched.name)

    def run(self, tick: Callable[[Any, Status], None] = lambda actor, status: None) -> Any:
        """Run the actor until its `run` method returns, and return the result. `tick(actor, status)` is called after
        each status call.
        """
        try:
            while True:
                try:
                    set_log_facts(attempt=self.restarts.budget.attempt(self.watched.name) + 1)
                    actor = self.watched.start()
                    self.restarts.mark_launched(self.watched.name)
                    return self._watch(actor, tick)
                except (ConfigError, NotFinite, StoreFailed, RestartsExhausted, Superseded, SupervisorGone):
                    raise  # A restart would not help, because the user or another supervisor process must act first.
                except Exception as error:  # noqa: BLE001 - the supervisor restarts it, whatever ended it
                    self._prepare_restart(first_line(error))
        finally:
            self.reporter.notes.flush()

    def _watch(self, actor: Any, tick: Callable[[Any, Status], None]) -> Any:
        running, vitals = actor.run.remote(), Vitals(self.watched.name, actor, self._answer)
        self._changed, before, name = time.monotonic(), None, self.watched.name
        poll = 0.0  # Seconds until the next status call. The first status is read at once, because engines wait for it.
        while not cluster.has_ended(running, poll):
            poll = POLL_SECONDS if self.restarts.outage(name) else self.watched.poll
            status = self._read_status(actor, vitals)
            self._last = status
            set_log_facts(version=status.progress.get("version"))
            self.reporter.report_recovery(self.restarts.note_progress(name, status.made))
            # An actor that waits for another stage's actor (`waits_for`) counts as making progress.
            if status.progress != before or status.waits_for:
                self._changed, before = time.monotonic(), status.progress
            self._check_progress()
            self._check_lease()
            tick(actor, status)
        result = cluster.call_within(running, self._answer, name)
        self.reporter.report_recovery(self.restarts.mark_up(name))
        return result

    def _read_status(self, actor: Any, vitals: Vitals) -> Status:
        """Return the actor's status. If the actor does not answer, this method waits as long as the actor's process is
        starting or computing.
        """
        asked = actor.status.remote()
        while not cluster.has_ended(asked, POLL_SECONDS):
            if vitals.check_actor():
                self._changed = time.monotonic()
            self._check_progress()
        status: Status = cluster.call_within(asked, self._answer, f"the status of {self.watched.name}")
        vitals.note_answer()
        return status

    def _check_progress(self) -> None:
        if time.monotonic() - self._changed > self.watched.patience:
            last = self._last.progress if self._last else None
            raise RollflowError(
                f"the actor made no progress for {self.watched.patience:g} s; its last reported progress: {last}"
            )

    def _check_lease(self) -> None:
        if self._lease.check_expiry():
            raise SupervisorGone(self._lease.lease.sentence)

    def _prepare_restart(self, reason: str) -> None:
        """Kill the remaining processes of the actor, and wait for the pause that the limit on restarts requires."""
        redone, trajectories = self.watched.redone(self._last) if self._last else ("its start", 0)
        outage = self.restarts.mark_down(self.watched.name, reason, redone, trajectories)
        self._last = None
        self.reporter.report_restart(outage)
        cluster.kill_named([self.watched.name])
        time.sleep(outage.pause)
