"""Calls the Prefect API: a call ends within about twenty seconds, or raises `Unreachable`. A server that is down for a
moment must not end a training run, so code that polls ignores `Unreachable`, and other code uses `call_until_answered`.
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
from uuid import UUID, uuid4

from rollflow.storage.errors import Unreachable

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State
    from prefect.client.schemas.responses import DeploymentResponse
    from prefect.settings import Settings

T = TypeVar("T")
CALL_SECONDS = 5.0
# number of retries of a request, after 2 and 4 s, if the server reports an error or stops answering
RETRIES = 2
INSIST_SECONDS = 60.0
# number of characters of an error message that are shown, because Prefect repeats a rejected body in full
MESSAGE = 500
PAGE = 200  # largest number of flow runs that the server returns in one answer
# name of the Prefect deployments of `rollflow serve`; `rollflow run` uses the run's key as the name
SERVED = "rollflow"
LAST = "zz-"  # name prefix of internal deployments: Prefect's page sorts by name, and recipes should come first
INTERNAL, RECIPE, NIGHTLY, OF_SESSION = "internal", "recipe", "nightly", "of one command"  # tags of deployments


@contextmanager
def open_client() -> Iterator[SyncPrefectClient]:
    """Yield a Prefect client that raises an error immediately if no server listens at the address.

    Raises:
        Unreachable: the Prefect server did not answer, or answered with an error.
    """
    from httpx import HTTPError
    from prefect.context import SettingsContext, get_settings_context

    around = get_settings_context()
    try:
        kept = _thread_client(around.settings)
        # If `_has_connected` were true, the Prefect client would wait for a server that is down.
        kept.client._client._has_connected = False  # type: ignore[attr-defined]
        with SettingsContext(profile=around.profile, settings=kept.settings):
            yield kept.client
    except HTTPError as error:
        raise Unreachable(
            f"a call of the Prefect API failed with {type(error).__name__}: {str(error)[:MESSAGE]}"
        ) from error


@dataclass(frozen=True, slots=True)
class _ThreadClient:
    """A Prefect client that is reused within one thread. Creating a client takes 70 ms of CPU time, while a call takes
    2 ms.
    """

    around: Settings  # the Prefect settings that were active when the client was created
    settings: Settings
    client: SyncPrefectClient


_threads = threading.local()


def _thread_client(around: Settings) -> _ThreadClient:
    """Return this thread's client for the Prefect server that the Prefect settings `around` name."""
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
    """Return the result of the idempotent function `call`, retried for `INSIST_SECONDS` while the Prefect server does
    not answer.
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
    """Return the time of the last request to start, retry or resume a flow run, in seconds since the epoch.

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
    """Create a flow run of a Prefect deployment and return its id; calls with the same `key` create one flow run.

    Without a `key`, each call has a key of its own, because Prefect's client repeats a request whose answer was late.
    `at` is the flow run's scheduled time in seconds since the epoch; None means now. `parent` is a task run of another
    flow run, below which Prefect's UI shows the new flow run.
    """
    from datetime import UTC, datetime

    from prefect.states import Scheduled

    found = _find(client, flow, deployment)
    made = client.create_flow_run_from_deployment(
        found.id,
        parameters=parameters,
        name=name,
        idempotency_key=key or uuid4().hex,
        tags=tags,
        parent_task_run_id=parent,
        state=None if at is None else Scheduled(scheduled_time=datetime.fromtimestamp(at, UTC)),
    )
    return made.id


def _find(client: SyncPrefectClient, flow: str, deployment: str) -> DeploymentResponse:
    """Return the Prefect deployment with this name; internal deployments are also found by the name that older versions
    of rollflow used.
    """
    from prefect.exceptions import ObjectNotFound

    internal, plain = (f"{flow}/{name}" for name in deployment_names(deployment))
    try:
        return client.read_deployment_by_name(internal)
    except ObjectNotFound:
        return client.read_deployment_by_name(plain)


def deployment_names(deployment: str) -> tuple[str, str]:
    """Return the current name of a runner's internal deployments, and the name that older versions of rollflow used."""
    return f"{LAST}{deployment}", deployment


def flow_state(flow_run: UUID) -> Any:
    """Return the state of a Prefect flow run."""
    with open_client() as client:
        return client.read_flow_run(flow_run).state


def states_of(client: SyncPrefectClient, flow_runs: Collection[UUID]) -> dict[UUID, State]:
    """Return the states of the given Prefect flow runs by id, with one request."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    if not flow_runs:
        return {}
    found = client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=list(flow_runs))))
    return {run.id: run.state for run in found if run.state}


def list_supervisors(client: SyncPrefectClient, most: int | None = PAGE) -> list[FlowRun]:
    """Return the newest `most` flow runs of supervisors (post-training flows) in all deployments, newest first; if
    `most` is None, return all.
    """
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
    """Return the time at which a Prefect flow run was created, in seconds since the epoch."""
    return flow_run.created.timestamp() if flow_run.created else 0.0


def filter_served(deployment: str) -> Any:
    """Return a filter for the Prefect deployments with this name; `SERVED` includes the deployments of recipes and
    nightly runs.
    """
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName, DeploymentFilterTags

    if deployment != SERVED:
        return DeploymentFilter(name=DeploymentFilterName(any_=[*deployment_names(deployment)]))
    either: Any = {"operator": "or_", "tags": DeploymentFilterTags(any_=[RECIPE, NIGHTLY])}
    return DeploymentFilter(name=DeploymentFilterName(any_=[*deployment_names(deployment)]), **either)


def unfinished_runs(client: SyncPrefectClient, deployment: str) -> list[FlowRun]:
    """Return a Prefect deployment's flow runs that have not ended, including those created in advance by a schedule."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
    from prefect.client.schemas.objects import TERMINAL_STATES, StateType

    open_types = [kind for kind in StateType if kind not in TERMINAL_STATES]
    unfinished = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=open_types)))
    found: dict[UUID, FlowRun] = {}
    # read page by page, because a single schedule creates a hundred flow runs in advance
    for start in range(0, sys.maxsize, PAGE):
        page = client.read_flow_runs(
            flow_run_filter=unfinished, deployment_filter=filter_served(deployment), limit=PAGE, offset=start
        )
        found |= {run.id: run for run in page}
        if len(page) < PAGE:
            break
    return list(found.values())


def crash_orphans(deployment: str, why: str, *, scheduled: bool = False) -> list[str]:
    """Mark the flow runs of a Prefect deployment as crashed if their runner process has died; return the flow runs'
    names.

    If `scheduled` is true, flow runs whose scheduled time has passed and that have not started are marked as well;
    otherwise the next runner process starts them. In the deployment `SERVED`, flow runs that wait for a user or for
    their scheduled time are not marked, because Prefect would not create them again.
    """
    from prefect.states import Crashed

    every = scheduled and deployment != SERVED  # a Prefect deployment other than `SERVED` serves a single run
    with open_client() as client:
        # A flow run on a work pool belongs to a worker of the pool, and not to this runner process.
        here = (run for run in unfinished_runs(client, deployment) if not run.work_pool_name)
        ended = [run for run in here if every or not _waits(run, due=not scheduled)]
        for run in ended:
            client.set_flow_run_state(run.id, Crashed(message=why), force=True)
    return [run.name for run in ended]


def _waits(run: FlowRun, *, due: bool) -> bool:
    """Return whether a Prefect flow run waits for a user or for its scheduled time; if `due` is true, a scheduled time
    in the past also counts.
    """
    if run.state is not None and run.state_type == "PAUSED":
        return bool(run.state.state_details.pause_reschedule)
    if run.state_type != "SCHEDULED" or due:
        return run.state_type == "SCHEDULED"
    at, follows = run.expected_start_time, (run.idempotency_key or "").startswith("after:")
    return at is not None and at.timestamp() > time.time() and not follows


def emit(flow_run: UUID, event: str, payload: dict[str, Any]) -> None:
    """Send an event about a flow run to the Prefect server."""
    from datetime import UTC, datetime

    from prefect.events.schemas.events import Event, Resource

    about = Resource({"prefect.resource.id": f"prefect.flow-run.{flow_run}"})
    made = Event(occurred=datetime.now(UTC), event=event, resource=about, payload=payload)
    with open_client() as client:
        client.request("POST", "/events", json=[made.model_dump(mode="json")])


def cancel_flow_run(client: SyncPrefectClient, run: UUID) -> None:
    """Ask Prefect to cancel a running flow run; the runner that started its process then ends the process."""
    from prefect.states import Cancelling

    state = client.read_flow_run(run).state
    if state is None or not state.is_final():
        client.set_flow_run_state(run, Cancelling())


def reason_of(message: str | None) -> str:
    """Return the reason in the state message of a Prefect flow run: the last line, without Prefect's introduction."""
    lines = (message or "").strip().splitlines() or ["no reason was given"]
    return lines[-1].removeprefix("Flow run encountered an exception: ").strip()
