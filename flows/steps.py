"""The Prefect tasks that a run is made of: what a person sees as its graph.

A step is a box on the page, named by what it did, after the step before it. It changes nothing of what it does: no
result of it is kept, so a supervisor that takes over does its own steps; and no request is made for it, so a Prefect
server that is away or slow is not waited for (Prefect sends what happens to a task in the background).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from uuid import UUID

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State, TaskRunResult
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import Abort
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Pending, Suspended

from rollflow.flows.services.prefect_api import api
from rollflow.storage.errors import Unreachable
from rollflow.storage.run_records.stop_requests import Ended
from rollflow.tasks.run.config import RunConfig

T = TypeVar("T")
BLOCKS = 20  # boxes for the versions of a run, at most


class Steps:
    """The steps of one flow run, one after the other."""

    def __init__(self) -> None:
        self._last: State | None = None

    def __call__(self, name: str, do: Callable[[], T], tell: Callable[[T], str] = lambda made: "") -> T:
        """What `do` returns or raises; `tell` says in a few words what came of it, for the box on the page."""
        made: list[T] = []
        ended: list[Ended] = []

        def work() -> State:
            try:
                made.append(do())
            except Ended as why:
                ended.append(why)
                return Cancelled(message=str(why))
            told = tell(made[0])
            said = f"{name}: {told}" if told else name
            TaskRunContext.get().task_run.name = said  # type: ignore[union-attr] # inside a task
            return Completed(message=said)

        box = Task(work, name=name, task_run_name=name, cache_policy=NO_CACHE, persist_result=False)
        before = [self._last] if self._last else None
        self._last = box(wait_for=before, return_state=True)
        if ended:
            raise ended[0]
        if not made:
            self._last.result()  # raises what `do` raised
        return made[0]


def blocks(done: int, versions: int) -> Iterator[tuple[int, int]]:
    """The versions after `done`, in blocks (first, last) whose bounds are the same for every supervisor of a run."""
    size = math.ceil(versions / BLOCKS)
    for last in (*range(size, versions, size), versions):
        first = max(done, (last - 1) // size * size) + 1
        if first <= last:
            yield first, last


def title(config: RunConfig) -> str:
    """Return a short title of the run: sorting-grpo-a2-s0."""
    return f"{config.name}-{config.train.objective.kind}-a{config.async_ratio:g}-s{config.seed}"


def run_name() -> str:
    """The name of a supervisor's flow run."""
    config: Any = flow_run.parameters["config"]
    return title(RunConfig.model_validate(config))


def tags(config: RunConfig, run_id: str, role: str) -> list[str]:
    """What flow runs of a run are found by on the page."""
    return [f"recipe:{config.name}", f"run:{run_id}", f"role:{role}"]


def tag(found: Sequence[str]) -> None:
    """Add tags to this flow run."""
    with api() as client:
        client.update_flow_run(UUID(str(flow_run.id)), tags=sorted({*flow_run.tags, *found}))


def cancel(why: str) -> State:
    """End this flow run as cancelled, by `Abort`: Prefect says of a state that is returned that it was an error.

    That state, to be returned, where the server does not answer.
    """
    state: State = Cancelled(message=why)
    with contextlib.suppress(Unreachable):
        with api() as client:
            client.set_flow_run_state(UUID(str(flow_run.id)), state, force=True)
        ended = Abort(why)
        setattr(ended, "state", state)  # noqa: B010 - Prefect's own way to say what it ended as
        raise ended
    return state


def suspend() -> State:
    """This flow run's state, once it is one that a resumption starts again: a process that waited would be in vain."""
    with api() as client:
        state = client.read_flow_run(UUID(str(flow_run.id))).state
        if state is None or not state.state_details.pause_reschedule:
            limit = state.state_details.pause_timeout if state else None
            state = Suspended(pause_expiration_time=limit)
            client.set_flow_run_state(UUID(str(flow_run.id)), state, force=True)
    return state


def stand_in(client: SyncPrefectClient, name: str, key: str) -> UUID | None:
    """A task run of this flow run that stands for a flow run elsewhere, which the page then shows below this one.

    It is what `run_deployment` makes. Calls with one `key` make one. None outside of a flow run.
    """
    flow, task = FlowRunContext.get(), TaskRunContext.get()
    if flow is None or flow.flow_run is None:
        return None
    parents: Any = {"__parents__": [TaskRunResult(id=task.task_run.id)]} if task else {}
    stands: Task[[], None] = Task(lambda: None, name=name)
    stands.task_key = f"rollflow.{name}"
    made = client.create_task_run(
        task=stands, flow_run_id=flow.flow_run.id, dynamic_key=key, name=name, task_inputs=parents, state=Pending()
    )
    return made.id
