"""Starts and watches the services that a command such as `rollflow run` needs: a Prefect server, a Ray cluster and a
Prefect runner.

A session is the set of services of one command. A session starts each service that the user does not provide, restarts
it if it dies, and stops it when the command ends. Services that the user provides (`PREFECT_API_URL`,
`cluster.address`, a running `rollflow serve`) are left running. The Prefect server belongs to the run home (rollflow's
folder of local files), and stops with the last command that uses it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID, uuid4

from rollflow.flows.keepalive.services import RAY, RUNNER, SERVER, ServiceKeeper
from rollflow.flows.locations import run_home
from rollflow.flows.ray_cluster.ray_head import RayHead
from rollflow.flows.registration.prefect_api import (
    SERVED,
    call_until_answered,
    crash_orphans,
    flow_state,
    open_client,
    start,
    unfinished_runs,
)
from rollflow.flows.registration.registering import check_unserved, sweep, withdraw
from rollflow.flows.services import stack
from rollflow.flows.services.home_server import HomeServer
from rollflow.flows.services.process import MlflowServer, PrefectServer, Runner, Service, start_together, stop_together
from rollflow.flows.services.profile import prefect_url
from rollflow.flows.services.stop_flag import StopFlag
from rollflow.flows.services.variables import OWN_PREFECT, OWN_RAY, drop_settings
from rollflow.flows.views.log_lines import logging_settings
from rollflow.flows.views.status import RunStatus
from rollflow.storage.errors import ConfigError, Unreachable
from rollflow.tasks.actors.early_imports import Kind, list_kinds
from rollflow.tasks.run.config import RecoveryConfig
from rollflow.tasks.run.context import RunContext

POLL_SECONDS = 0.5
LOOK_SECONDS = 2.0  # Seconds between two checks of the services and of the supervising flow run.
CANCEL_SECONDS = 60.0
STACK = "stack"


@dataclass(frozen=True)
class Session:
    """The services that one command uses. `services` maps the role of a service to the service.

    `page` is the address of the Prefect UI for the command's user. `login` is text for the user that says where to find
    the password of a private Prefect server. `environment` has the environment variables that a process needs to use
    the services.
    """

    deployment: str
    page: str
    services: Mapping[str, Service]
    # Text about where to find the password of the Prefect UI, or "" if the session did not start the server.
    login: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    def submit(self, context: RunContext, began: float) -> UUID:
        """Create the Prefect flow run that supervises the training run. The scheduled time of the flow run is `began`,
        the start of the command in seconds since the epoch.
        """
        parameters = {"config": context.config.model_dump(mode="json"), "storage": context.uri}
        key = uuid4().hex

        def submit() -> UUID:
            with open_client() as client:
                return start(
                    client, "post-training", self.deployment, parameters, name=context.run_id, key=key, at=began
                )

        return call_until_answered(submit)

    def follow(self, context: RunContext, flow_run: UUID) -> Iterator[RunStatus]:
        """Yield the training run's status repeatedly until the run has ended."""
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

    def serve(self, log: Callable[[str], None], ended: StopFlag) -> None:
        """Restart each service that dies, until `ended` is set. On a private Prefect server, crashed supervising flow
        runs are restarted, too.

        Raises:
            RestartsExhausted: a service died too often to be restarted again.
        """
        from rollflow.flows.keepalive.supervisor_restart import SupervisorRestarter

        service_keeper = self.service_keeper(RecoveryConfig())
        pick_up = SupervisorRestarter(self.deployment) if SERVER in self.services else None
        while not ended.wait(LOOK_SECONDS):
            service_keeper.look(lambda recovery: log(f"recovered {recovery.sentence()}"))
            if pick_up:
                pick_up.look(log)

    def service_keeper(self, limits: RecoveryConfig) -> ServiceKeeper:
        """Return the object that restarts dead services of this session."""
        return ServiceKeeper(self.deployment, self.services, limits)

    def cancel(self, context: RunContext) -> None:
        """Cancel the Prefect flow runs of the training run. If the Ray cluster continues after this session, kill the
        run's actors, too.
        """
        if RUNNER in self.services:
            self._cancel_flows()
        else:
            self._ask_to_cancel(context)
        address = context.config.cluster.address
        if address == "auto" and RAY not in self.services:
            address = self.environment["ROLLFLOW_RAY_ADDRESS"]
        if address != "auto":
            from rollflow.flows.keepalive.stages import kill_actors
            from rollflow.flows.ray_cluster import cluster

            with cluster.attached_cluster(address, context.key):
                kill_actors(context)

    def _cancel_flows(self) -> None:
        from prefect.states import Cancelled

        with contextlib.suppress(Unreachable), open_client() as client:
            for run in unfinished_runs(client, self.deployment):
                client.set_flow_run_state(run.id, Cancelled(message="the run was stopped by Ctrl-C"), force=True)

    def _ask_to_cancel(self, context: RunContext) -> None:
        """Ask Prefect to cancel this training run's flow runs in `rollflow serve`. Wait until the flow runs have ended,
        at most `CANCEL_SECONDS`.
        """
        from rollflow.flows.registration.prefect_api import cancel_flow_run

        with contextlib.suppress(Unreachable):
            with open_client() as client:
                runs = [
                    run for run in unfinished_runs(client, self.deployment) if context.uri in run.parameters.values()
                ]
                for run in runs:
                    cancel_flow_run(client, run.id)
            limit = time.monotonic() + CANCEL_SECONDS
            while runs and time.monotonic() < limit:
                time.sleep(POLL_SECONDS)
                runs = [run for run in runs if not flow_state(run.id).is_final()]


@contextmanager
def session_of(context: RunContext) -> Iterator[Session]:
    """Yield the services for one run: those of a running `rollflow serve`, or newly started services."""
    up, given = stack.find(run_home()), prefect_url()
    if up is None or given not in ("", up.environment["PREFECT_API_URL"]):
        config = context.config
        with open_session(context.key, config.cluster.address, spares=list_kinds(config)) as session:
            yield session
        return
    drop_settings(os.environ, (*OWN_PREFECT, *OWN_RAY))
    os.environ.update(up.environment)
    yield Session(SERVED, up.page, {STACK: stack.BorrowedStack(run_home())}, up.login, up.environment)


@contextmanager
def open_session(
    name: str, ray_address: str, *extra: Service, ray_port: int | None = None, spares: Sequence[Kind] = ()
) -> Iterator[Session]:
    """Start the services that the user does not provide, and serve the flows as deployments named `name`. All started
    services are stopped after the `with` block.

    `spares` lists the kinds of Ray workers that are started before an actor needs them.
    """
    place, given = run_home(), prefect_url()
    server = None if given else HomeServer(place)
    ray = RayHead(place, port=ray_port, spares=spares, keep_spares=name == SERVED) if ray_address == "auto" else None
    page = server.ui_url if server else given.removesuffix("/api")
    environment = {
        **(server.env if server else {"PREFECT_API_URL": given}),
        **(ray.env | {"ROLLFLOW_RAY_ADDRESS": ray.address} if ray else {}),
        "ROLLFLOW_HOME": str(place),
        "PREFECT_LOCAL_STORAGE_PATH": str(place / "results"),  # Folder in which Prefect stores the results of flows.
        "ROLLFLOW_DEPLOYMENT": name,
        # The address of the Prefect UI, or the command that shows it if the server ends with this session.
        "ROLLFLOW_PREFECT_PAGE": "rollflow serve" if server and name != SERVED else page,
        "ROLLFLOW_MLFLOW_PAGE": next((service.url for service in extra if isinstance(service, MlflowServer)), ""),
    }
    held = {SERVER: server, RAY: ray, **{service.what: service for service in extra}}
    services = {role: service for role, service in held.items() if service is not None}
    begin = place / "cache" / name / "runner-may-begin"
    runner = _build_runner(place, name, environment, begin, watched=name != SERVED or server is not None)
    drop_settings(os.environ, (*(OWN_PREFECT if server else ()), *(OWN_RAY if ray else ())))
    os.environ.update(environment)
    try:
        start_together(*services.values(), meanwhile=lambda: _import_prefect(runner))
        if name != SERVED and not server:
            call_until_answered(lambda: check_unserved(name, place))
        if server or name != SERVED:  # In these cases, no other command serves the same deployments.
            call_until_answered(lambda: crash_orphans(name, "its session died", scheduled=True))
            call_until_answered(sweep)
        begin.touch()
        runner.wait()
        yield Session(name, page, services | {RUNNER: runner}, _describe_login(server), environment)
    finally:
        runner.stop()
        if begin.exists():  # Delete the deployments that the runner may have registered.
            with contextlib.suppress(Unreachable):
                withdraw(name, place)
        stop_together(*services.values())


def _build_runner(place: Path, name: str, environment: Mapping[str, str], begin: Path, *, watched: bool) -> Runner:
    """Return the session's Prefect runner, which serves the flows as soon as the file `begin` exists.

    If `watched` is true, the session restarts crashed runs; otherwise Prefect automations restart them.
    """
    log, ready = place / "logs" / name / "runner.log", begin.with_name("runner-ready")
    ready.parent.mkdir(parents=True, exist_ok=True)
    begin.unlink(missing_ok=True)
    # Level of the log that the page of a flow run in Prefect shows. The terminal shows only the live view.
    level = {"PREFECT_LOGGING_LEVEL": "INFO"}
    variables = {**environment, **logging_settings(shared=name == SERVED), **level}
    arguments = ["--begin", str(begin), "--ready", str(ready), *(["--no-automations"] if watched else [])]
    return Runner(log, variables, arguments=arguments, ready=ready)


def _describe_login(server: PrefectServer | None) -> str:
    return f" (its page asks for the text in {shlex.quote(str(server.auth_file))})" if server else ""


def _import_prefect(runner: Runner) -> None:
    """Start the Prefect runner, and import Prefect in this process while the runner imports Prefect, too.

    Raises:
        ConfigError: Prefect rejects the value of one of its environment variables.
    """
    runner.launch()
    try:
        from prefect.settings import get_current_settings

        get_current_settings()
    except ValueError as error:  # The value of a Prefect setting is invalid; the error does not name the variable.
        given = ", ".join(sorted(name for name in os.environ if name.startswith("PREFECT_")))
        reason = " ".join(f"{error}".split())[:200]
        raise ConfigError(f"Prefect refuses a value of {given} ({reason}); correct or unset the variable") from None
