"""The Prefect API as sessions and recoveries use it: a call ends within some twenty seconds, or raises `Unreachable`.

A server that is down for a moment must not end a run. A watcher skips a look, and looks again. A caller that needs the
answer asks again (`insist`).

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
RETRIES = 2  # after 2 and 4 s, where the server answers that it cannot (SQLite is locked) or not at all any more
INSIST_SECONDS = 60.0
MESSAGE = 500  # characters of what it said; of a body that it refuses it repeats all
PAGE = 200  # flow runs the server gives at once
SERVED = "rollflow"  # the deployments of `rollflow serve`; a run's own session serves them by the run's key
LAST = "zz-"  # prefix of internal deployments: Prefect's page sorts by name, and recipes come first
INTERNAL, RECIPE, NIGHTLY, OF_SESSION = "internal", "recipe", "nightly", "of one command"  # tags of deployments


@contextmanager
def api() -> Iterator[SyncPrefectClient]:
    """A client that fails at once where nothing listens.

    Raises:
        Unreachable: the server did not answer, or answered that it cannot.
    """
    from httpx import HTTPError
    from prefect.context import SettingsContext, get_settings_context

    around = get_settings_context()
    try:
        kept = _kept(around.settings)
        kept.client._client._has_connected = False  # type: ignore[attr-defined] # else it waits for a server that is down
        with SettingsContext(profile=around.profile, settings=kept.settings):
            yield kept.client
    except HTTPError as error:
        raise Unreachable(f"the Prefect API: {type(error).__name__}: {str(error)[:MESSAGE]}") from error


@dataclass(frozen=True, slots=True)
class _Kept:
    """A thread's client. Making one takes 70 ms of a core, a call by it 2; watchers call every second."""

    around: Settings  # under which it was made
    settings: Settings
    client: SyncPrefectClient


_threads = threading.local()


def _kept(around: Settings) -> _Kept:
    """This thread's client for the server that the settings name."""
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    kept: _Kept | None = getattr(_threads, "kept", None)
    if kept is None or kept.around is not around:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: RETRIES}) as settings:
            client = get_client(sync_client=True, httpx_settings={"timeout": CALL_SECONDS})
            client.__enter__()
        kept = _threads.kept = _Kept(around, settings, client)
    return kept


def insist(call: Callable[[], T]) -> T:
    """The value of `call`, made again for `INSIST_SECONDS` while the server does not answer; it must be idempotent."""
    limit = time.monotonic() + INSIST_SECONDS
    while True:
        try:
            return call()
        except Unreachable:
            if time.monotonic() > limit:
                raise
            time.sleep(1.0)


def asked_for(flow_run: UUID) -> float:
    """When a flow run was asked to run the last time: started, retried or resumed; in seconds since the epoch.

    Raises:
        Unreachable: the server did not answer.
    """
    with api() as client:
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
    """Schedule a flow run of a deployment; calls with one `key` give the same flow run, however often they are made.

    `at` is when it was asked for, in seconds since the epoch; by default, now.
    `parent` is the task run of another flow run under which the page shows it.
    """
    from datetime import UTC, datetime

    from prefect.states import Scheduled

    served = _find(client, flow, deployment)
    made = client.create_flow_run_from_deployment(
        served.id,
        parameters=parameters,
        name=name,
        idempotency_key=key,
        tags=tags,
        parent_task_run_id=parent,
        state=None if at is None else Scheduled(scheduled_time=datetime.fromtimestamp(at, UTC)),
    )
    return made.id


def _find(client: SyncPrefectClient, flow: str, deployment: str) -> DeploymentResponse:
    """Return a deployment by its name: an internal one by its present name, or by that of older versions."""
    from prefect.exceptions import ObjectNotFound

    internal, plain = (f"{flow}/{name}" for name in names_of(deployment))
    try:
        return client.read_deployment_by_name(internal)
    except ObjectNotFound:
        return client.read_deployment_by_name(plain)


def names_of(deployment: str) -> tuple[str, str]:
    """Return the names of a runner's internal deployments in Prefect: the present one, and that of older versions."""
    return f"{LAST}{deployment}", deployment


def flow_state(flow_run: UUID) -> Any:
    """The state of a flow run."""
    with api() as client:
        return client.read_flow_run(flow_run).state


def states_of(client: SyncPrefectClient, flow_runs: Collection[UUID]) -> dict[UUID, State]:
    """The states of these flow runs, by one request."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    if not flow_runs:
        return {}
    found = client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=list(flow_runs))))
    return {run.id: run.state for run in found if run.state}


def supervisors(client: SyncPrefectClient, most: int | None = PAGE) -> list[FlowRun]:
    """The newest flow runs of the supervisor, of every deployment, the newest first; None: all there are."""
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
    """When a flow run was made, in seconds since the epoch."""
    return flow_run.created.timestamp() if flow_run.created else 0.0


def served(deployment: str) -> Any:
    """A filter: the deployments of this name; `SERVED` has those of recipes and nights, too."""
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName, DeploymentFilterTags

    if deployment != SERVED:
        return DeploymentFilter(name=DeploymentFilterName(any_=[*names_of(deployment)]))
    either: Any = {"operator": "or_", "tags": DeploymentFilterTags(any_=[RECIPE, NIGHTLY])}
    return DeploymentFilter(name=DeploymentFilterName(any_=[*names_of(deployment)]), **either)


def going(client: SyncPrefectClient, deployment: str) -> list[FlowRun]:
    """The flow runs of a deployment that have not ended, those that a schedule has planned, too."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
    from prefect.client.schemas.objects import TERMINAL_STATES, StateType

    open_types = [kind for kind in StateType if kind not in TERMINAL_STATES]
    unfinished = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=open_types)))
    found: dict[UUID, FlowRun] = {}
    for start in range(0, sys.maxsize, PAGE):  # a schedule alone plans a hundred
        page = client.read_flow_runs(
            flow_run_filter=unfinished, deployment_filter=served(deployment), limit=PAGE, offset=start
        )
        found |= {run.id: run for run in page}
        if len(page) < PAGE:
            break
    return list(found.values())


def crash_orphans(deployment: str, why: str, *, scheduled: bool = False) -> list[str]:
    """Mark a deployment's flow runs as crashed: their processes ended with their runner, and nobody else will say so.

    `scheduled` includes flow runs that are due and have not started; otherwise they are left for the next runner. What
    waits for a person or for its time is left, where the deployment is `SERVED`: a night that is planned, say, which
    Prefect would plan no second time. Returns the names of the flow runs.
    """
    from prefect.states import Crashed

    every = scheduled and deployment != SERVED  # of one run, which begins anew
    with api() as client:
        here = (run for run in going(client, deployment) if not run.work_pool_name)  # else a worker has it
        ended = [run for run in here if every or not _waits(run, due=not scheduled)]
        for run in ended:
            client.set_flow_run_state(run.id, Crashed(message=why), force=True)
    return [run.name for run in ended]


def _waits(run: FlowRun, *, due: bool) -> bool:
    """Whether it waits for a person or for its time; `due`: also where that has come."""
    if run.state is not None and run.state_type == "PAUSED":
        return bool(run.state.state_details.pause_reschedule)
    if run.state_type != "SCHEDULED" or due:
        return run.state_type == "SCHEDULED"
    at, follows = run.expected_start_time, (run.idempotency_key or "").startswith("after:")
    return at is not None and at.timestamp() > time.time() and not follows


def emit(flow_run: UUID, event: str, payload: dict[str, Any]) -> None:
    """An event on a flow run's page."""
    from datetime import UTC, datetime

    from prefect.events.schemas.events import Event, Resource

    about = Resource({"prefect.resource.id": f"prefect.flow-run.{flow_run}"})
    made = Event(occurred=datetime.now(UTC), event=event, resource=about, payload=payload)
    with api() as client:
        client.request("POST", "/events", json=[made.model_dump(mode="json")])
