"""A run's supervisor that crashed is started again, by whoever notices first: exactly once for each crash.

    crashed flow run --> its run --> ended, or a newer flow run supervises it?  nothing to do
                                 --> otherwise the same deployment, the same parameters, the same run

Only the newest flow run of a run is followed up, and what follows it is named by its id (the idempotency key), so
that a session, an automation and a person may all do this at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any
from uuid import UUID

from rollflow.flows.keepalive.restarts import GaveUp, Pending, pause_after
from rollflow.flows.locations import attach_run, context_of, run_id_of, store_uri
from rollflow.flows.services.prefect_api import api, emit, flow_state, served, supervisors
from rollflow.flows.views.summary import SUMMARY
from rollflow.storage.errors import ConfigError, RollflowError, Unreachable
from rollflow.storage.run_records.recoveries import Notes
from rollflow.tasks.run.config import RecoveryConfig, RunConfig
from rollflow.tasks.run.context import RunContext

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

READ_SECONDS = 5.0
REDONE = "its start; the actors that live go on"


@dataclass
class Successor:
    """The flow run that goes on with a run. `pending` is the recovery under way; None: somebody else started it."""

    context: RunContext
    flow_run: UUID
    pending: Pending | None = None

    @cached_property
    def notes(self) -> Notes:
        """Where its recovery is written down."""
        return Notes(self.context.store)

    def up(self) -> bool:
        """Whether it runs (or has ended); the recovery is written down when that is first seen.

        Raises:
            Unreachable: the Prefect server does not answer.
        """
        state = flow_state(self.flow_run)
        if state is None or not (state.is_running() or state.is_final()):
            return False
        if self.pending:
            recovery, self.pending = self.pending.done(), None
            self.notes.add(recovery)
            emit(self.flow_run, "rollflow.recovery", asdict(recovery))
        return True


class PickUp:
    """Follows up the crashed supervisors of a runner's deployments, for as long as it is looked at."""

    def __init__(self, deployment: str) -> None:
        self._deployment = deployment
        self._seen: set[UUID] = set()
        self._starting: list[Successor] = []

    def look(self, log: Callable[[str], None]) -> None:
        """Follow up the crashes that are new; one that cannot be is told once and left."""
        self._starting = [successor for successor in self._starting if not is_up(successor)]
        with contextlib.suppress(Unreachable), api() as client:
            here = {one.id for one in client.read_deployments(deployment_filter=served(self._deployment))}
            for run in supervisors(client):
                new = run.deployment_id in here and run.state_type == "CRASHED" and run.id not in self._seen
                if new and self._followed_up(run, log):
                    self._seen.add(run.id)

    def _followed_up(self, crashed: FlowRun, log: Callable[[str], None]) -> bool:
        """Whether all is done for it; one whose storage does not answer has a next look, and holds up no other."""
        name = run_uri(crashed).rpartition("/")[2]
        try:
            successor = start_again(crashed.id, replace(run_of(crashed), patience=READ_SECONDS))
        except Unreachable:
            return False
        except RollflowError as error:
            log(f"run {name} is not started again: {error}")
            return True
        if successor and successor.pending:
            log(f"run {name} goes on: {successor.pending.reason}")
            self._starting.append(successor)
        return True


def is_up(successor: Successor) -> bool:
    """Whether it is up, as far as the Prefect server says."""
    try:
        return successor.up()
    except Unreachable:
        return False


def start_again(flow_run: UUID, context: RunContext) -> Successor | None:
    """Start the supervisor of `context` again after `flow_run` crashed, or find the one that follows it already.

    None where nothing is to be done: the run has ended, or the flow run did not crash.

    What was started before a person or a schedule last started the run counts against no budget.

    Raises:
        GaveUp: it crashed too often.
        Unreachable: the Prefect server does not answer.
    """
    if context.store.exists(SUMMARY):
        return None
    with api() as client:
        attempts = [run for run in supervisors(client, None) if run_uri(run) == context.uri]
        if not attempts:
            return None
        crashed = line(attempts, attempts[0].id)[-1]
        if crashed.id != flow_run:
            return Successor(context, crashed.id)
        if not (crashed.state and crashed.state.is_crashed() and crashed.deployment_id):
            return None
        crashes = [run for run in attempts if run.state and run.state.is_crashed()]
        counted = {run.id for run in line_before(attempts, crashed)}
        times = [ended_at(run) for run in crashes if run.id in counted]
        begin = _scheduled(_pause(client, crashed, times, _limits(context, crashed)))
        made = client.create_flow_run_from_deployment(
            crashed.deployment_id,
            parameters=crashed.parameters | {"run_id": context.uri.rpartition("/")[2]},
            state=begin,
            name=crashed.name,
            idempotency_key=f"after:{crashed.id}",
        )
    if made.state is None or made.state.state_details.scheduled_time != begin.state_details.scheduled_time:
        return Successor(context, made.id)  # somebody else made it since, and writes the recovery down
    return Successor(context, made.id, Pending("supervisor", crash_reason(crashed), len(crashes), REDONE))


def follows_another(flow_run: UUID) -> bool:
    """Whether it was started because one before it crashed, and not by a person or a schedule.

    A person may retry it, too, or resume it after a pause: then it runs a second time, which no recovery does.
    """
    made = read(flow_run)
    return (made.idempotency_key or "").startswith("after:") and made.run_count < 2


def line(attempts: Sequence[FlowRun], first: UUID) -> list[FlowRun]:
    """`first` and the flow runs that followed it, each after the one before: by their names, not by a clock."""
    after = {run.idempotency_key: run for run in attempts}
    found = [run for run in attempts if run.id == first]
    while found and (successor := after.get(f"after:{found[-1].id}")):
        found.append(successor)
    return found


def line_before(attempts: Sequence[FlowRun], last: FlowRun) -> list[FlowRun]:
    """`last` and the flow runs that it follows, back to the one that a person or a schedule started."""
    by_follower = {f"after:{run.id}": run for run in attempts}
    found = [last]
    while before := by_follower.get(found[-1].idempotency_key or ""):
        found.append(before)
    return found


def _limits(context: RunContext, crashed: FlowRun) -> RecoveryConfig:
    """Return the run's current limits; for a run that crashed before it was prepared, those that it was asked with."""
    try:
        return context.config.recovery
    except ConfigError:
        return RunConfig.model_validate(crashed.parameters["config"]).recovery


def _pause(client: SyncPrefectClient, crashed: FlowRun, crashes: Sequence[float], limits: RecoveryConfig) -> float:
    """The pause; over the budget the flow run is said to have failed: nobody is to follow it up any more."""
    from prefect.states import Failed

    try:
        return pause_before(crashes, time.time(), limits)
    except GaveUp as error:
        client.set_flow_run_state(crashed.id, Failed(message=str(error)), force=True)
        raise


def pause_before(crashes: Sequence[float], now: float, limits: RecoveryConfig) -> float:
    """Seconds to wait before the next start, given when it crashed; a clock that stepped back may say: in the future.

    Raises:
        GaveUp: too often within the window.
    """
    recent = sum(abs(now - at) < limits.window_seconds for at in crashes)
    if recent > limits.restarts:
        raise GaveUp(
            f"the supervisor was started again {limits.restarts} times within {limits.window_seconds:g} s "
            "(recovery.restarts) and died once more"
        )
    return pause_after(max(0, recent - 1), limits)


def crash_reason(crashed: FlowRun) -> str:
    """What its flow run's page says of its end, in short."""
    message = (crashed.state.message if crashed.state else None) or "its process ended"
    return message.partition(". ")[0]


def run_uri(flow_run: FlowRun) -> str:
    """The storage of the run that a supervisor's flow run is about; "" where its parameters name none."""
    given = flow_run.parameters
    if given.get("storage"):
        return str(given["storage"]).rstrip("/")
    try:
        config = RunConfig.model_validate(given.get("config"))
    except ValueError:  # refused by the flow as well
        return ""
    run_id = given.get("run_id") or run_id_of(config.name, str(flow_run.id))
    try:
        return context_of(store_uri(config), run_id).uri
    except ConfigError:  # refused by the flow as well
        return ""


def run_of(flow_run: FlowRun) -> RunContext:
    """The run that a supervisor's flow run is about."""
    return attach_run(run_uri(flow_run))


def read(flow_run: UUID) -> FlowRun:
    """A flow run."""
    with api() as client:
        return client.read_flow_run(flow_run)


def ended_at(flow_run: FlowRun) -> float:
    """When a flow run ended, in seconds since the epoch."""
    ended: Any = flow_run.end_time or (flow_run.state.timestamp if flow_run.state else None)
    return float(ended.timestamp()) if ended else 0.0


def _scheduled(pause_seconds: float) -> Any:
    from datetime import UTC, datetime, timedelta

    from prefect.states import Scheduled

    return Scheduled(scheduled_time=datetime.now(UTC) + timedelta(seconds=pause_seconds))
