"""The Prefect API for sessions and recoveries: a call ends within about twenty seconds, or raises `Unreachable`.

A server that is down for a moment must not end a run. A watcher skips one look at the server and continues. A caller
that needs the answer retries with `call_until_answered`.

Importing this module does not import Prefect.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from rollflow.storage.errors import Unreachable

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State
    from prefect.client.schemas.responses import DeploymentResponse
    from prefect.settings import Settings

T = TypeVar("T")
CALL_SECONDS = 5.0
# retries of a request, after 2 and 4 s, if the server reports an error (such as a locked SQLite file) or stops
# answering
RETRIES = 2
INSIST_SECONDS = 60.0
MESSAGE = 500  # longest part of an error message that is shown, in characters: Prefect repeats a rejected body in full
PAGE = 200  # largest number of flow runs in one answer of the server
# name of the deployments of `rollflow serve`; a session of one run names its deployments by the run's key
SERVED = "rollflow"
LAST = "zz-"  # name prefix of internal deployments: Prefect's page sorts by name, and recipes should come first
INTERNAL, RECIPE, NIGHTLY, OF_SESSION = "internal", "recipe", "nightly", "of one command"  # tags of deployments


@contextmanager
def open_client() -> Iterator[SyncPrefectClient]:
    """Yield a client that fails at once if nothing listens at the server's address.

    Raises:
        Unreachable: the server did not answer, or answered with an error.
    """
    from httpx import HTTPError
    from prefect.context import SettingsContext, get_settings_context

    around = get_settings_context()
    try:
        kept = _thread_client(around.settings)
        # Without this setting, the client waits for a server that is down.
        kept.client._client._has_connected = False  # type: ignore[attr-defined]
        with SettingsContext(profile=around.profile, settings=kept.settings):
            yield kept.client
    except HTTPError as error:
        raise Unreachable(f"the Prefect API: {type(error).__name__}: {str(error)[:MESSAGE]}") from error


@dataclass(frozen=True, slots=True)
class _ThreadClient:
    """A thread's Prefect client, which is reused: creating a client takes 70 ms of a core, a call 2 ms, and watchers
    call every second.
    """

    around: Settings  # the Prefect settings under which the client was created
    settings: Settings
    client: SyncPrefectClient


_threads = threading.local()


def _thread_client(around: Settings) -> _ThreadClient:
    """Return this thread's client for the server that the settings name."""
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    kept: _ThreadClient | None = getattr(_threads, "kept", None)
    if kept is None or kept.around is not around:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: RETRIES}) as settings:
            client = get_client(sync_client=True, httpx_settings={"timeout": CALL_SECONDS})
            client.__enter__()
        kept = _threads.kept = _ThreadClient(around, settings, client)
    return kept


def call_until_answered(call: Callable[[], T]) -> T:
    """Return the result of `call`, retried for `INSIST_SECONDS` while the server does not answer; `call` must be
    idempotent.
    """
    limit = time.monotonic() + INSIST_SECONDS
    while True:
        try:
            return call()
        except Unreachable:
            if time.monotonic() > limit:
                raise
            time.sleep(1.0)


def requested_at(flow_run: UUID) -> float:
    """Return the time of the last request to run a flow run (a start, retry or resumption), in seconds since the epoch.

    Raises:
        Unreachable: the server did not answer.
    """
    with open_client() as client:
        states = client.read_flow_run_states(flow_run)
    planned = [state.state_details.scheduled_time or state.timestamp for state in states if state.is_scheduled()]
    return max((when.timestamp() for when in planned), default=0.0)


def start(
    client: SyncPrefectClient,
    flow: str,
    deployment: str,
    parameters: dict[str, Any],
    *,
    name: str | None = None,
    key: str | None = None,
    tags: Collection[str] = (),
    parent: UUID | None = None,
    at: float | None = None,
) -> UUID:
    """Schedule a flow run of a deployment; calls with the same `key` give the same flow run.

    `at` is the time of the request for the flow run, in seconds since the epoch; by default, the present time. `parent`
    is the task run of another flow run; Prefect's page shows the new flow run below this task run.
    """
    from datetime import UTC, datetime

    from prefect.states import Scheduled

    found = _find(client, flow, deployment)
    made = client.create_flow_run_from_deployment(
        found.id,
        parameters=parameters,
        name=name,
        idempotency_key=key,
        tags=tags,
        parent_task_run_id=parent,
        state=None if at is None else Scheduled(scheduled_time=datetime.fromtimestamp(at, UTC)),
    )
    return made.id


def _find(client: SyncPrefectClient, flow: str, deployment: str) -> DeploymentResponse:
    """Return the deployment of this name; an internal deployment is also found by its name in older versions."""
    from prefect.exceptions import ObjectNotFound

    internal, plain = (f"{flow}/{name}" for name in deployment_names(deployment))
    try:
        return client.read_deployment_by_name(internal)
    except ObjectNotFound:
        return client.read_deployment_by_name(plain)


def deployment_names(deployment: str) -> tuple[str, str]:
    """Return the names of a runner's internal deployments in Prefect: the present name, and the name in older
    versions.
    """
    return f"{LAST}{deployment}", deployment


def flow_state(flow_run: UUID) -> Any:
    """Return the state of a flow run."""
    with open_client() as client:
        return client.read_flow_run(flow_run).state


def states_of(client: SyncPrefectClient, flow_runs: Collection[UUID]) -> dict[UUID, State]:
    """Return the states of these flow runs, by one request."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    if not flow_runs:
        return {}
    found = client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=list(flow_runs))))
    return {run.id: run.state for run in found if run.state}


def list_supervisors(client: SyncPrefectClient, most: int | None = PAGE) -> list[FlowRun]:
    """Return the newest `most` flow runs of supervisors, of every deployment, newest first; with None, return all."""
    from prefect.client.schemas.filters import FlowFilter, FlowFilterName
    from prefect.client.schemas.sorting import FlowRunSort

    flow = FlowFilter(name=FlowFilterName(any_=["post-training"]))
    found: dict[UUID, FlowRun] = {}
    for start in range(0, most or sys.maxsize, PAGE):
        sort = FlowRunSort.EXPECTED_START_TIME_DESC
        page = client.read_flow_runs(flow_filter=flow, sort=sort, limit=PAGE, offset=start)
        found |= {run.id: run for run in page}
        if len(page) < PAGE:
            break
    return sorted(found.values(), key=created_at, reverse=True)


def created_at(flow_run: FlowRun) -> float:
    """Return the time at which a flow run was created, in seconds since the epoch."""
    return flow_run.created.timestamp() if flow_run.created else 0.0


def filter_served(deployment: str) -> Any:
    """Return a filter for the deployments of this name; `SERVED` includes those of recipes and nights."""
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName, DeploymentFilterTags

    if deployment != SERVED:
        return DeploymentFilter(name=DeploymentFilterName(any_=[*deployment_names(deployment)]))
    either: Any = {"operator": "or_", "tags": DeploymentFilterTags(any_=[RECIPE, NIGHTLY])}
    return DeploymentFilter(name=DeploymentFilterName(any_=[*deployment_names(deployment)]), **either)


def unfinished_runs(client: SyncPrefectClient, deployment: str) -> list[FlowRun]:
    """Return a deployment's flow runs that have not ended, including those that a schedule has planned."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
    from prefect.client.schemas.objects import TERMINAL_STATES, StateType

    open_types = [kind for kind in StateType if kind not in TERMINAL_STATES]
    unfinished = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=open_types)))
    found: dict[UUID, FlowRun] = {}
    for start in range(0, sys.maxsize, PAGE):  # several pages may be needed: a schedule alone plans a hundred flow runs
        page = client.read_flow_runs(
            flow_run_filter=unfinished, deployment_filter=filter_served(deployment), limit=PAGE, offset=start
        )
        found |= {run.id: run for run in page}
        if len(page) < PAGE:
            break
    return list(found.values())


def crash_orphans(deployment: str, why: str, *, scheduled: bool = False) -> list[str]:
    """Mark a deployment's flow runs as crashed: their processes ended with their runner, so no runner can report the
    crash.

    With `scheduled`, flow runs that are due and have not started are marked, too; otherwise the next runner starts
    these flow runs. On `SERVED`, flow runs that wait for a user or for their time are left alone: Prefect would not
    plan a night a second time. Returns the names of the flow runs.
    """
    from prefect.states import Crashed

    every = scheduled and deployment != SERVED  # a session serves one run only, and its flow runs start from scratch
    with open_client() as client:
        # a flow run with a work pool belongs to a worker
        here = (run for run in unfinished_runs(client, deployment) if not run.work_pool_name)
        ended = [run for run in here if every or not _waits(run, due=not scheduled)]
        for run in ended:
            client.set_flow_run_state(run.id, Crashed(message=why), force=True)
    return [run.name for run in ended]


def _waits(run: FlowRun, *, due: bool) -> bool:
    """Return whether the flow run waits for a user or for its scheduled time; with `due`, also if that time has
    come.
    """
    if run.state is not None and run.state_type == "PAUSED":
        return bool(run.state.state_details.pause_reschedule)
    if run.state_type != "SCHEDULED" or due:
        return run.state_type == "SCHEDULED"
    at, follows = run.expected_start_time, (run.idempotency_key or "").startswith("after:")
    return at is not None and at.timestamp() > time.time() and not follows


def emit(flow_run: UUID, event: str, payload: dict[str, Any]) -> None:
    """Send an event to a flow run's page."""
    from datetime import UTC, datetime

    from prefect.events.schemas.events import Event, Resource

    about = Resource({"prefect.resource.id": f"prefect.flow-run.{flow_run}"})
    made = Event(occurred=datetime.now(UTC), event=event, resource=about, payload=payload)
    with open_client() as client:
        client.request("POST", "/events", json=[made.model_dump(mode="json")])


def cancel_flow_run(client: SyncPrefectClient, run: UUID) -> None:
    """Cancel a flow run that has not ended; the flow run's runner then ends the process."""
    from prefect.states import Cancelling

    state = client.read_flow_run(run).state
    if state is None or not state.is_final():
        client.set_flow_run_state(run, Cancelling())


def reason_of(message: str | None) -> str:
    """Return a flow run's reason without Prefect's introduction; for a traceback, its last line."""
    lines = (message or "").strip().splitlines() or ["no reason was given"]
    return lines[-1].removeprefix("Flow run encountered an exception: ").strip()
