"""Runs the steps of a supervising flow as Prefect tasks, which the flow run's page in Prefect shows as a graph. The box
of a step shows the step's result. Prefect stores no results, so a restarted flow run repeats the steps. An unreachable
Prefect server delays no step, because Prefect sends the events of tasks in the background.
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

from rollflow.flows.registration.prefect_api import open_client
from rollflow.storage.errors import Unreachable
from rollflow.storage.run_records.stop_requests import RunEnded
from rollflow.tasks.run.config import RunConfig

T = TypeVar("T")
# Largest number of blocks into which the policy versions of a run are split. Each block is a box on the run's page.
BLOCKS = 20


class Steps:
    """Runs the steps of one flow run, one after another, as Prefect tasks."""

    def __init__(self) -> None:
        self._last: State | None = None

    def __call__(self, name: str, do: Callable[[], T], tell: Callable[[T], str] = lambda result: "") -> T:
        """Run `do` as a step named `name`; return its result or raise its error. `tell` turns the result into a few
        words that the step's box on the Prefect page shows.
        """
        results: list[T] = []
        ended: list[RunEnded] = []

        def work() -> State:
            try:
                results.append(do())
            except RunEnded as why:
                ended.append(why)
                return Cancelled(message=str(why))
            words = tell(results[0])
            label = f"{name}: {words}" if words else name
            TaskRunContext.get().task_run.name = label  # type: ignore[union-attr] # inside a task
            return Completed(message=label)

        box = Task(work, name=name, task_run_name=name, cache_policy=NO_CACHE, persist_result=False)
        before = [self._last] if self._last else None
        self._last = box(wait_for=before, return_state=True)
        if ended:
            raise ended[0]
        if not results:
            self._last.result()  # raises the error of `do`
        return results[0]


def split_blocks(done: int, versions: int) -> Iterator[tuple[int, int]]:
    """Split the policy versions after `done` into blocks, and yield the first and the last version of each block. The
    blocks of a run begin at fixed policy versions, so a restarted supervisor uses the same blocks.
    """
    size = math.ceil(versions / BLOCKS)
    for last in (*range(size, versions, size), versions):
        first = max(done, (last - 1) // size * size) + 1
        if first <= last:
            yield first, last


def run_title(config: RunConfig) -> str:
    """Return a short title of the training run: its recipe, objective, alpha and seed, such as sorting-grpo-a2-s0."""
    return f"{config.name}-{config.train.objective.kind}-a{config.async_ratio:g}-s{config.seed}"


def run_name() -> str:
    """Return the name that the Prefect UI shows for the flow run that supervises a training run."""
    config: Any = flow_run.parameters["config"]
    return run_title(RunConfig.model_validate(config))


def build_tags(config: RunConfig, run_id: str, role: str) -> list[str]:
    """Return the tags of a flow run, by which users can filter the flow runs of a training run in the Prefect UI."""
    return [f"recipe:{config.name}", f"run:{run_id}", f"role:{role}"]


def tag(found: Sequence[str]) -> None:
    """Add tags to this flow run."""
    with open_client() as client:
        client.update_flow_run(UUID(str(flow_run.id)), tags=sorted({*flow_run.tags, *found}))


def cancel(why: str) -> State:
    """Set the state of this flow run to cancelled, and raise `Abort`. If the Prefect server does not answer, return the
    state.

    The exception `Abort` is needed because Prefect reports a flow that returns the state `Cancelled` as an error.
    """
    state: State = Cancelled(message=why)
    with contextlib.suppress(Unreachable):
        with open_client() as client:
            client.set_flow_run_state(UUID(str(flow_run.id)), state, force=True)
        ended = Abort(why)
        setattr(ended, "state", state)  # noqa: B010 - how Prefect itself records the final state
        raise ended
    return state


def suspend() -> State:
    """Suspend this flow run, and return its state. The process of a suspended flow run can end, because Prefect resumes
    the flow run in a new process.
    """
    with open_client() as client:
        state = client.read_flow_run(UUID(str(flow_run.id))).state
        if state is None or not state.state_details.pause_reschedule:
            limit = state.state_details.pause_timeout if state else None
            state = Suspended(pause_expiration_time=limit)
            client.set_flow_run_state(UUID(str(flow_run.id)), state, force=True)
    return state


def create_stand_in(client: SyncPrefectClient, name: str, key: str) -> UUID | None:
    """Create a task run that stands for another flow run, and return its id. On the page of this flow run in Prefect,
    the other flow run is shown below this one.

    Several calls with the same `key` create only one task run. Outside a flow run, nothing is created, and None is
    returned.
    """
    flow, task = FlowRunContext.get(), TaskRunContext.get()
    if flow is None or flow.flow_run is None:
        return None
    parents: Any = {"__parents__": [TaskRunResult(id=task.task_run.id)]} if task else {}
    stands: Task[[], None] = Task(lambda: None, name=name)
    stands.task_key = f"rollflow.{name}"
    task_run = client.create_task_run(
        task=stands, flow_run_id=flow.flow_run.id, dynamic_key=key, name=name, task_inputs=parents, state=Pending()
    )
    return task_run.id
