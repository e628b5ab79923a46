"""Follows a run for `rollflow run`: reads the run's status from its storage, and restarts its supervisor after a crash.

The supervisor is the Prefect flow that starts and watches a run's stages. The supervisor is restarted if its process,
its runner or its Ray cluster was killed. If the supervisor's flow run failed or was cancelled, the training run ends.
If the supervisor's flow run was paused, `rollflow run` waits until a user resumes it. The run is not affected if the
Prefect server or the storage is unreachable for a moment.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

from rollflow.flows.keepalive.costs import session_costs
from rollflow.flows.keepalive.restarts import RestartsExhausted
from rollflow.flows.keepalive.services import ServiceKeeper
from rollflow.flows.registration.prefect_api import emit, flow_state, open_client
from rollflow.flows.views.status import RunStatus, read_status
from rollflow.storage.errors import RollflowError, Unreachable
from rollflow.storage.run_records.recoveries import Notes, Recovery
from rollflow.storage.run_records.usage import CpuUsage, store_usage
from rollflow.tasks.run.context import RunContext

if TYPE_CHECKING:
    from rollflow.flows.keepalive.supervisor_restart import Successor

POLL_SECONDS = 0.5
END_SECONDS = 30.0
COUNT_SECONDS = 20.0
# Time limit in seconds for a read from storage, so that a dead supervisor is restarted even if storage is down.
READ_SECONDS = 5.0
AWAY = "the run's storage does not answer; the run waits for it"


class SupervisorKeeper:
    """Restarts the supervisor (the supervising Prefect flow run) of one run when it crashes."""

    def __init__(self, context: RunContext, flow_run: UUID, services: ServiceKeeper) -> None:
        self._usage, self._writer, self._counted = CpuUsage(), f"session-{flow_run.hex[-12:]}", 0.0
        self.context, self.flow_run, self._services = replace(context, patience=READ_SECONDS), flow_run, services
        self._patience = context.config.rollout.patience_seconds
        self._since = time.monotonic()
        self._successor: Successor | None = None
        self._notes = Notes(context.store)
        self._window = context.config.recovery.window_seconds
        self._moved: tuple[object, float] = (None, time.monotonic())

    def read(self, before: RunStatus) -> RunStatus:
        """Return the status that the run's present supervisor has written, or `before` if the supervisor has written
        none.
        """
        try:
            return read_status(self.context, self.flow_run) or before
        except Unreachable:
            # While storage does not answer, a supervisor that works cannot write its status, either.
            self._moved = self._moved[0], time.monotonic()
            return before if AWAY in before.messages else replace(before, messages=(*before.messages[-2:], AWAY))

    def look(self, status: RunStatus) -> RunStatus:
        """Check the services and the run's supervisor, and return the run's status. The returned phase is "failed" only
        if the run has ended with a failure.
        """
        self._store_cpu_usage(status)
        if status.phase == "done":
            return status
        try:
            self._services.look(self._record)
            return self._look_at_supervisor(status)
        except Unreachable:
            return replace(status, phase="ending") if status.ended else status
        except RestartsExhausted as error:
            return _mark_failed(status, str(error))

    def await_end(self) -> None:
        """Wait until the supervisor's flow run has reached its final state. After the final state is stored, the
        Prefect server may be stopped.
        """
        self._notes.flush()
        limit = time.monotonic() + END_SECONDS
        while time.monotonic() < limit:
            with contextlib.suppress(Unreachable, RestartsExhausted):
                # The supervisor may be waiting until this process has restarted the Prefect server.
                self._services.look(self._record)
                state = flow_state(self.flow_run)
                if state is not None and state.is_final():
                    return
            time.sleep(POLL_SECONDS)

    def _store_cpu_usage(self, status: RunStatus) -> None:
        """Measure the CPU time of services and flows, and write it to the run's storage, every `COUNT_SECONDS` and at
        the run's end.
        """
        if not status.ended and time.monotonic() - self._counted < COUNT_SECONDS:
            return
        self._counted = time.monotonic()
        self._usage.note(session_costs(self._services.services, str(self.flow_run)))
        with contextlib.suppress(RollflowError, OSError):
            store_usage(self.context.store, self._writer, self._usage)

    def _look_at_supervisor(self, status: RunStatus) -> RunStatus:
        state = flow_state(self.flow_run)
        if state is None or state.is_completed():
            return status
        if state.is_crashed():
            return self._restart_supervisor(status)
        if state.is_failed() and self._services.cluster_lost_at > self._since:
            self._mark_crashed("its Ray cluster was lost")
            return self._restart_supervisor(status)
        if state.is_cancelled():
            return replace(status, phase="stopped")
        if state.is_final():
            return _mark_failed(
                status, (state.message or state.name).removeprefix("Flow run encountered an exception: ")
            )
        if self._successor and self._successor.check_up():
            self._successor = None
        if state.is_paused():
            return replace(status, phase="paused")
        self._note_progress(status, state)
        if self._is_stuck(status):
            if status.ended:
                return status
            self._mark_crashed(f"it wrote no status for too long (phase: {status.phase})")
            return self._restart_supervisor(status)
        return replace(status, phase="ending") if status.ended else status

    def _note_progress(self, status: RunStatus, state: Any) -> None:
        seen = (status.phase, status.seconds, state.type)
        if seen != self._moved[0]:
            self._moved = seen, time.monotonic()

    def _is_stuck(self, status: RunStatus) -> bool:
        """Return whether the run's supervisor has written no new status for too long."""
        longest = self._patience if status.phase == "training" else self._patience + self._window
        return time.monotonic() - self._moved[1] > longest

    def _mark_crashed(self, reason: str) -> None:
        from prefect.states import Crashed

        with open_client() as client:
            client.set_flow_run_state(self.flow_run, Crashed(message=reason), force=True)

    def _restart_supervisor(self, status: RunStatus) -> RunStatus:
        from rollflow.flows.keepalive.supervisor_restart import restart_supervisor

        successor = restart_supervisor(self.flow_run, self.context)
        if successor is None:
            return replace(status, phase="done")
        self._successor, self.flow_run, self._since = successor, successor.flow_run, time.monotonic()
        self._moved = None, time.monotonic()
        reason = successor.pending.reason if successor.pending else "another process restarted it"
        return replace(status, phase="starting", messages=(f"the supervisor restarts: {reason}",))

    def _record(self, recovery: Recovery) -> None:
        """Record the recovery of a crashed component in the run's storage and in the supervisor's Prefect flow run. An
        unreachable Prefect server is ignored.
        """
        self._notes.add(recovery)
        with contextlib.suppress(Unreachable):
            emit(self.flow_run, "rollflow.recovery", asdict(recovery))


def _mark_failed(status: RunStatus, why: Any) -> RunStatus:
    """Return the status of a failed run. If the stored status already has a reason for the failure, `why` is not
    used.
    """
    if status.phase == "failed":
        return status
    return status.at_end("failed", str(why))
