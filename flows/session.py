"""What `rollflow run` holds while a run lasts: a Prefect server, a Ray cluster, a runner. What is not given is private.

Everything that it started ends with it, whatever the reason. What it did not start (`PREFECT_API_URL`,
`cluster.address`) is used and left as it was. A service that it started is started again when it dies
(`keepalive.services`), and so is the run's supervisor (`keepalive.supervisor`).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import UUID, uuid4

from rollflow.flows.keepalive.services import RAY, RUNNER, SERVER, ServiceKeeper
from rollflow.flows.locations import home
from rollflow.flows.services.prefect_api import SERVED, api, crash_orphans, going, insist, start
from rollflow.flows.services.process import PrefectServer, Runner, Service, start_together, stop_together
from rollflow.flows.services.ray_head import RayHead
from rollflow.flows.services.reachability import check_mlflow, check_prefect, check_ray, check_store_reach
from rollflow.flows.services.registering import sweep, withdraw
from rollflow.flows.views.status import RunStatus
from rollflow.storage.errors import Unreachable
from rollflow.storage.objects import open_store
from rollflow.tasks.config import RecoveryConfig, RunConfig
from rollflow.tasks.run_context import RunContext

POLL_SECONDS = 0.5
LOOK_SECONDS = 1.0


def check_addresses(config: RunConfig, store: str) -> None:
    """Check, before anything is started, that every service that is named is there; `ConfigError` says which is not.

    Every node of the cluster must reach the run's `store`, too.
    """
    check_store_reach(store, config.cluster.address)
    if url := os.environ.get("PREFECT_API_URL"):
        check_prefect(url)
    check_ray(config.cluster.address)
    if config.cluster.address != "auto" and open_store(store).local_path("runs"):
        from rollflow.flows.services import cluster

        with cluster.attached(config.cluster.address, "check"):
            check_store_reach(store, config.cluster.address, cluster.nodes())
    if config.tracking.uri:
        check_mlflow(config.tracking.uri)


@dataclass(frozen=True)
class Session:
    """The services of one command, by role. `page` is the Prefect UI; a private one asks for what `login` says."""

    deployment: str
    page: str
    services: Mapping[str, Service]

    @property
    def login(self) -> str:
        """How a person gets what the page asks for; "" if the server is not ours."""
        server = self.services.get(SERVER)
        if not isinstance(server, PrefectServer):
            return ""
        return f" (asks for what this prints: cat {shlex.quote(str(server.auth_file))})"

    def submit(self, context: RunContext) -> UUID:
        """Start the supervisor's flow run."""
        parameters = {"config": context.config.model_dump(mode="json"), "storage": context.uri}
        key = uuid4().hex

        def submit() -> UUID:
            with api() as client:
                return start(client, "post-training", self.deployment, parameters, name=context.run_id, key=key)

        return insist(submit)

    def follow(self, context: RunContext, flow_run: UUID) -> Iterator[RunStatus]:
        """Yield the run's status, again and again until it ended; the last one says how.

        Meanwhile whatever died is started again: see `keepalive.services` and `keepalive.supervisor`.
        """
        from rollflow.flows.keepalive.supervisor import SupervisorKeeper

        keeper = SupervisorKeeper(context, flow_run, self.service_keeper(context.config.recovery))
        looked, status = 0.0, RunStatus(context.run_id, versions=context.config.versions)
        while not status.ended:
            time.sleep(POLL_SECONDS)
            status = keeper.read(status)
            if status.ended or time.monotonic() - looked > LOOK_SECONDS:
                status, looked = keeper.look(status), time.monotonic()
            yield status
        keeper.await_end()

    def serve(self, log: Callable[[str], None], ended: threading.Event) -> None:
        """Look after the services, and on a private server after the runs, until `ended` is set.

        Raises:
            GaveUp: a service cannot be kept up.
        """
        from rollflow.flows.keepalive.crashed import PickUp

        service_keeper = self.service_keeper(RecoveryConfig())
        pick_up = PickUp(self.deployment) if SERVER in self.services else None
        while not ended.wait(LOOK_SECONDS):
            service_keeper.look(lambda recovery: log(f"recovered {recovery.sentence()}"))
            if pick_up:
                pick_up.look(log)

    def service_keeper(self, limits: RecoveryConfig) -> ServiceKeeper:
        """The keeper that looks after the services."""
        return ServiceKeeper(self.deployment, self.services, limits)

    def cancel(self, context: RunContext) -> None:
        """End the run's flow runs as cancelled, and its actors if the cluster is not ours to stop."""
        self._cancel_flows()
        if context.config.cluster.address != "auto":
            from rollflow.flows.keepalive.stages import kill_actors
            from rollflow.flows.services import cluster

            with cluster.attached(context.config.cluster.address, context.key):
                kill_actors(context)

    def _cancel_flows(self) -> None:
        from prefect.states import Cancelled

        with contextlib.suppress(Unreachable), api() as client:
            for run in going(client, self.deployment):
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
    watched = [] if name == SERVED and not server else ["--no-automations"]
    runner = Runner(logs / "runner.log", told, arguments=["--ready", str(ready), *watched], ready=ready)
    given = {SERVER: server, RAY: ray, **{service.what: service for service in extra}}
    services = {role: service for role, service in given.items() if service is not None}
    os.environ.update(environment)
    try:
        start_together(*services.values(), meanwhile=_import_prefect)
        if server or name != SERVED:  # nobody else serves these deployments
            insist(lambda: crash_orphans(name, "its session died", scheduled=True))
            insist(sweep)
        runner.start()
        yield Session(name, page, services | {RUNNER: runner})
    finally:
        runner.stop()
        if runner.pid > 0:  # it may have registered them
            with contextlib.suppress(Unreachable):
                withdraw(name)
        stop_together(*services.values())


def _import_prefect() -> None:
    import prefect.deployments  # noqa: F401 - takes seconds
