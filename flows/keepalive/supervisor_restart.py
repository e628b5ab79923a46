"""Restarts the crashed supervisor (supervising Prefect flow run) of a training run. Each crash of a supervisor leads to
exactly one restart, even if several processes notice the crash.

    crashed flow run --> its run --> ended, or a newer flow run supervises it?  nothing to do
                                 --> otherwise the same deployment, the same parameters, the same run

Only the newest flow run of a run gets a successor, a flow run that continues the run. The successor's idempotency key
contains the id of the crashed flow run, so a session, an automation and a user who restart the supervisor at the same
time create only one flow run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any
from uuid import UUID

from rollflow.flows.keepalive.restarts import PendingRecovery, RestartsExhausted, pause_after
from rollflow.flows.locations import attach_run, context_of, run_id_of, store_uri
from rollflow.flows.registration.prefect_api import emit, filter_served, flow_state, list_supervisors, open_client
from rollflow.flows.views.summary import SUMMARY
from rollflow.storage.errors import ConfigError, RollflowError, Unreachable
from rollflow.storage.run_records.recoveries import Notes
from rollflow.tasks.run.config import RecoveryConfig, RunConfig
from rollflow.tasks.run.context import RunContext, translate_recorded

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

READ_SECONDS = 5.0
REDONE = "the supervisor's start; living actors continue"


@dataclass
class Successor:
    """The Prefect flow run that continues a training run after its supervising flow run has crashed. `pending` is the
    recovery that is not finished yet. `pending` is None if another process created the flow run.
    """

    context: RunContext
    flow_run: UUID
    pending: PendingRecovery | None = None

    @cached_property
    def notes(self) -> Notes:
        """The queue that writes the recovery of the supervisor to the run's storage."""
        return Notes(self.context.store)

    def check_up(self) -> bool:
        """Return whether the successor flow run is running or has ended. If the successor is running or has ended,
        record the recovery of the supervisor.

        Raises:
            Unreachable: the Prefect server does not answer.
        """
        state = flow_state(self.flow_run)
        if state is None or not (state.is_running() or state.is_final()):
            return False
        if self.pending:
            recovery, self.pending = self.pending.finish_recovery(), None
            self.notes.add(recovery)
            emit(self.flow_run, "rollflow.recovery", asdict(recovery))
        return True


class SupervisorRestarter:
    """Restarts the crashed supervisors (supervising flow runs) of all runs that a Prefect runner serves."""

    def __init__(self, deployment: str) -> None:
        self._deployment = deployment
        self._seen: set[UUID] = set()
        self._starting: list[Successor] = []

    def look(self, log: Callable[[str], None]) -> None:
        """Restart the supervisors (supervising flow runs) that have crashed since the last call. If a supervisor cannot
        be restarted, the reason is logged once, and there is no further try.
        """
        self._starting = [successor for successor in self._starting if not is_up(successor)]
        with contextlib.suppress(Unreachable), open_client() as client:
            here = {found.id for found in client.read_deployments(deployment_filter=filter_served(self._deployment))}
            for run in list_supervisors(client):
                new = run.deployment_id in here and run.state_type == "CRASHED" and run.id not in self._seen
                if new and self._follow_up(run, log):
                    self._seen.add(run.id)

    def _follow_up(self, crashed: FlowRun, log: Callable[[str], None]) -> bool:
        """Restart the crashed supervisor of a run. Return False if the run's storage does not answer, so that the next
        call of `look` tries again.
        """
        name = run_uri(crashed).rpartition("/")[2]
        try:
            successor = restart_supervisor(crashed.id, replace(run_of(crashed), patience=READ_SECONDS))
        except Unreachable:
            return False
        except RollflowError as error:
            log(f"run {name} cannot be restarted: {error}")
            return True
        if successor and successor.pending:
            log(f"run {name} is restarted: {successor.pending.reason}")
            self._starting.append(successor)
        return True


def is_up(successor: Successor) -> bool:
    """Return whether the successor flow run is running or has ended. Return False if the Prefect server does not answer
    the question.
    """
    try:
        return successor.check_up()
    except Unreachable:
        return False


def restart_supervisor(flow_run: UUID, context: RunContext) -> Successor | None:
    """Restart the supervisor of the run `context` after its flow run `flow_run` crashed. If a successor of the crashed
    flow run exists already, return the existing successor.

    Return None if the training run has ended, or if the flow run did not crash. Crashes before a user or a schedule
    last started the run do not count against the limit on restarts.

    Raises:
        RestartsExhausted: the supervisor crashed too often.
        Unreachable: the Prefect server does not answer.
    """
    if context.store.exists(SUMMARY):
        return None
    with open_client() as client:
        attempts = [run for run in list_supervisors(client, None) if run_uri(run) == context.uri]
        if not attempts:
            return None
        crashed = list_successors(attempts, attempts[0].id)[-1]
        if crashed.id != flow_run:
            return Successor(context, crashed.id)
        if not (crashed.state and crashed.state.is_crashed() and crashed.deployment_id):
            return None
        crashes = [run for run in attempts if run.state and run.state.is_crashed()]
        counted = {run.id for run in list_predecessors(attempts, crashed)}
        times = [ended_at(run) for run in crashes if run.id in counted]
        begin = _schedule_after(_compute_pause(client, crashed, times, _read_limits(context, crashed)))
        made = client.create_flow_run_from_deployment(
            crashed.deployment_id,
            parameters=_parameters(crashed) | {"run_id": context.uri.rpartition("/")[2]},
            state=begin,
            name=crashed.name,
            idempotency_key=f"after:{crashed.id}",
        )
    if made.state is None or made.state.state_details.scheduled_time != begin.state_details.scheduled_time:
        return Successor(context, made.id)  # Another process created the successor, and records the recovery.
    return Successor(context, made.id, PendingRecovery("supervisor", crash_reason(crashed), len(crashes), REDONE))


def follows_another(flow_run: UUID) -> bool:
    """Return whether a flow run was created because another flow run crashed. Return False for a flow run that a user
    or a schedule created.

    A flow run that a user has retried or resumed counts as created by a user.
    """
    made = read_flow_run(flow_run)
    return (made.idempotency_key or "").startswith("after:") and made.run_count < 2


def list_successors(attempts: Sequence[FlowRun], first: UUID) -> list[FlowRun]:
    """Return the flow run `first` and its successors."""
    after = {run.idempotency_key: run for run in attempts}
    found = [run for run in attempts if run.id == first]
    while found and (successor := after.get(f"after:{found[-1].id}")):
        found.append(successor)
    return found


def list_predecessors(attempts: Sequence[FlowRun], last: FlowRun) -> list[FlowRun]:
    """Return the flow run `last` and its predecessors, back to the flow run that a user or a schedule started."""
    by_follower = {f"after:{run.id}": run for run in attempts}
    found = [last]
    while before := by_follower.get(found[-1].idempotency_key or ""):
        found.append(before)
    return found


def _read_limits(context: RunContext, crashed: FlowRun) -> RecoveryConfig:
    """Return the present limits on restarts of the run."""
    try:
        return context.config.recovery
    except ConfigError:
        return RunConfig.model_validate(_parameters(crashed)["config"]).recovery


def _compute_pause(
    client: SyncPrefectClient, crashed: FlowRun, crashes: Sequence[float], limits: RecoveryConfig
) -> float:
    """Return the pause in seconds before the supervisor is restarted. If the supervisor was restarted too often, mark
    its flow run as failed, so that no process restarts it.
    """
    from prefect.states import Failed

    try:
        return pause_before(crashes, time.time(), limits)
    except RestartsExhausted as error:
        client.set_flow_run_state(crashed.id, Failed(message=str(error)), force=True)
        raise


def pause_before(crashes: Sequence[float], now: float, limits: RecoveryConfig) -> float:
    """Compute the pause in seconds before the supervisor's next start, from the times of its crashes.

    A crash time may be later than `now`, because the clock may have been set back.

    Raises:
        RestartsExhausted: the supervisor crashed too often within the time window.
    """
    recent = sum(abs(now - at) < limits.window_seconds for at in crashes)
    if recent > limits.restarts:
        raise RestartsExhausted(
            f"the supervisor was restarted {limits.restarts} times within {limits.window_seconds:g} s, the "
            "limit of recovery.restarts, and died again"
        )
    return pause_after(max(0, recent - 1), limits)


def crash_reason(crashed: FlowRun) -> str:
    """Return the first sentence of a crashed flow run's message."""
    message = (crashed.state.message if crashed.state else None) or "its process ended"
    return message.partition(". ")[0]


def run_uri(flow_run: FlowRun) -> str:
    """Return the storage URI of the training run that a Prefect flow run supervises. Return "" if the parameters of the
    flow run name no storage URI.
    """
    given = _parameters(flow_run)
    if given.get("storage"):
        return str(given["storage"]).rstrip("/")
    try:
        config = RunConfig.model_validate(given.get("config"))
    except ValueError:  # the flow itself rejects such a parameter
        return ""
    run_id = given.get("run_id") or run_id_of(config.name, str(flow_run.id))
    try:
        return context_of(store_uri(config), run_id).uri
    except ConfigError:  # the flow itself rejects such a parameter
        return ""


def _parameters(flow_run: FlowRun) -> dict[str, Any]:
    """Return the parameters of a supervisor's flow run. A config of an older release is translated."""
    given, config = flow_run.parameters, flow_run.parameters.get("config")
    return given | {"config": translate_recorded(config)} if isinstance(config, Mapping) else given


def run_of(flow_run: FlowRun) -> RunContext:
    """Return the context of the training run that a Prefect flow run supervises."""
    return attach_run(run_uri(flow_run))


def read_flow_run(flow_run: UUID) -> FlowRun:
    """Return a flow run, read from the Prefect server."""
    with open_client() as client:
        return client.read_flow_run(flow_run)


def ended_at(flow_run: FlowRun) -> float:
    """Return the time at which a flow run ended, in seconds since the epoch."""
    ended: Any = flow_run.end_time or (flow_run.state.timestamp if flow_run.state else None)
    return float(ended.timestamp()) if ended else 0.0


def _schedule_after(pause_seconds: float) -> Any:
    from datetime import UTC, datetime, timedelta

    from prefect.states import Scheduled

    return Scheduled(scheduled_time=datetime.now(UTC) + timedelta(seconds=pause_seconds))
