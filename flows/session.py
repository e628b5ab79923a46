"""What `rollflow run` holds while a run lasts: a Prefect server, a Ray cluster, a runner; private where none is given.

Everything it started ends with it, whatever the reason. What it did not start (`PREFECT_API_URL`,
`cluster.address`) is used and left as it was.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from rollflow.flows.home import home
from rollflow.flows.ray_head import RayHead
from rollflow.flows.reachability import check_mlflow, check_prefect, check_ray
from rollflow.flows.services import PrefectServer, Runner, Service, start_together, stop_together
from rollflow.flows.status import STATUS, RunStatus
from rollflow.storage.errors import Missing
from rollflow.tasks.run import RunContext
from rollflow.tasks.settings import RunConfig

POLL_SECONDS = 0.5
STATE_SECONDS = 2.0
END_SECONDS = 30.0


def check_addresses(config: RunConfig) -> None:
    """Every service that is named must be there, before anything is started; `ConfigError` says which is not."""
    if url := os.environ.get("PREFECT_API_URL"):
        check_prefect(url)
    check_ray(config.cluster.address)
    if config.tracking.uri:
        check_mlflow(config.tracking.uri)


@dataclass(frozen=True)
class Session:
    """The services of one command. `page` is the Prefect UI."""

    deployment: str
    page: str
    runner: Runner

    def submit(self, context: RunContext) -> UUID:
        """Start the supervisor's flow run."""
        from prefect.deployments import run_deployment

        made: Any = run_deployment(
            name=f"post-training/{self.deployment}",
            parameters={"config": context.config.model_dump(mode="json"), "storage": context.uri},
            timeout=0,
            flow_run_name=context.run_id,
        )
        return UUID(str(made.id))

    def follow(self, context: RunContext, flow_run: UUID) -> Iterator[RunStatus]:
        """The run's status, again and again until it ended; the last one says how."""
        looked, submitted = 0.0, time.time()
        status = RunStatus(context.run_id, versions=context.config.versions)
        while not status.ended:
            time.sleep(POLL_SECONDS)
            status = read_status(context, submitted) or status
            if not status.ended and time.monotonic() - looked > STATE_SECONDS:
                looked = time.monotonic()
                status = self._ended_without_word(flow_run, status)
            yield status
        self._await_end(flow_run)

    def _ended_without_word(self, flow_run: UUID, status: RunStatus) -> RunStatus:
        """A supervisor that died or never started cannot write its status: its flow run's state tells."""
        from dataclasses import replace

        state = flow_state(flow_run)
        if state is not None and state.is_final() and not state.is_completed():
            return replace(status, phase="failed", messages=(*status.messages, state.message or state.name))
        if not self.runner.running:
            return replace(
                status, phase="failed", messages=(*status.messages, f"the runner died; see {self.runner.log}")
            )
        return status

    @staticmethod
    def _await_end(flow_run: UUID) -> None:
        """Let the supervisor's flow run reach its final state before its server goes."""
        limit = time.monotonic() + END_SECONDS
        while time.monotonic() < limit:
            state = flow_state(flow_run)
            if state is not None and state.is_final():
                return
            time.sleep(POLL_SECONDS)

    def cancel(self, context: RunContext) -> None:
        """End the run's flow runs as cancelled, and its actors where the cluster is not ours to stop."""
        self._cancel_flows()
        if context.config.cluster.address != "auto":
            from rollflow.flows import cluster
            from rollflow.flows.stages import kill_actors

            with cluster.attached(context.config.cluster.address, context.run_id):
                kill_actors(context)

    def _cancel_flows(self) -> None:
        from prefect.client.orchestration import get_client
        from prefect.client.schemas.filters import (
            DeploymentFilter,
            DeploymentFilterName,
            FlowRunFilter,
            FlowRunFilterState,
            FlowRunFilterStateType,
        )
        from prefect.client.schemas.objects import StateType
        from prefect.states import Cancelled

        going = FlowRunFilter(
            state=FlowRunFilterState(
                type=FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.PENDING, StateType.SCHEDULED])
            )
        )
        here = DeploymentFilter(name=DeploymentFilterName(any_=[self.deployment]))
        with get_client(sync_client=True) as client:
            for run in client.read_flow_runs(flow_run_filter=going, deployment_filter=here):
                client.set_flow_run_state(run.id, Cancelled(message="stopped by Ctrl-C"), force=True)


@contextmanager
def open_session(name: str, ray_address: str, *extra: Service) -> Iterator[Session]:
    """Start what is not given, serve the deployments as `name`, and end all of it with the block."""
    place = home()
    server = None if os.environ.get("PREFECT_API_URL") else PrefectServer(place)
    ray = RayHead(place) if ray_address == "auto" else None
    page = server.ui_url if server else os.environ["PREFECT_API_URL"].removesuffix("/api")
    environment = {
        **(server.env if server else {}),
        **(ray.env | {"ROLLFLOW_RAY_ADDRESS": ray.address} if ray else {}),
        "ROLLFLOW_HOME": str(place),
        "ROLLFLOW_DEPLOYMENT": name,
        "ROLLFLOW_PREFECT_PAGE": "rollflow serve" if server else page,
    }
    logs, ready = place / "logs" / name, place / "cache" / name / "runner-ready"
    ready.parent.mkdir(parents=True, exist_ok=True)
    told = environment | {"PREFECT_LOGGING_LEVEL": "INFO"}  # for the flow runs' pages; the terminal has the live view
    runner = Runner(logs / "runner.log", told, arguments=["--ready", str(ready)], ready=ready)
    services = tuple(service for service in (server, ray, *extra) if service)
    os.environ.update(environment)
    try:
        start_together(*services)
        runner.launch()
        import prefect.deployments  # noqa: F401 - seconds, which the runner needs as well

        runner.wait()
        yield Session(name, page, runner)
    finally:
        stop_together(*services, runner)


def read_status(context: RunContext, since: float) -> RunStatus | None:
    """The run's `status.json`, unless it is older than `since` (left by an earlier attempt)."""
    try:
        status = RunStatus.from_json(context.store.get(STATUS))
    except Missing:
        return None
    began = float(context.described["created_at"]) + status.seconds
    return status if began >= since - 1 else None


def flow_state(flow_run: UUID) -> Any:
    """The state of a flow run."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return client.read_flow_run(flow_run).state
