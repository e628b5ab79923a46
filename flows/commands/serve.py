"""`rollflow serve`: serves the Prefect UI for starting runs, and MLflow for comparing runs. `rollflow up` serves both
in the background.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from urllib.parse import urlsplit

from rollflow.flows.commands import OK
from rollflow.flows.locations import run_home
from rollflow.flows.registration.prefect_api import SERVED
from rollflow.flows.services import stack
from rollflow.flows.services.home_server import is_free, read_addresses, stable_port, store_addresses
from rollflow.flows.services.locks import is_held
from rollflow.flows.services.process import MlflowServer
from rollflow.flows.services.profile import prefect_url
from rollflow.flows.services.reachability import check_prefect, check_prefect_database, redact
from rollflow.flows.services.stop_flag import StopFlag
from rollflow.flows.session import open_session
from rollflow.flows.tracking.tracking import VIEW
from rollflow.storage.errors import ConfigError
from rollflow.tasks.actors.early_imports import MODULES


def command(options: argparse.Namespace) -> int:
    """Serve the deployments and both UIs until Ctrl-C."""
    place = run_home()
    ended = StopFlag()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with stack.hold_stack(place):
        store_addresses(place, **requested_addresses(options))
        if given := prefect_url():
            check_prefect(given)
        elif database := read_addresses(place).get("database"):
            check_prefect_database(database)
        mlflow = MlflowServer(place, port=stable_port(place, "mlflow"))
        port, kinds = stable_port(place, "ray"), tuple(MODULES)
        with open_session(SERVED, "auto", mlflow, ray_port=port, spares=kinds) as session:
            page = f"{mlflow.url}/#/experiments{VIEW}"
            up = stack.Stack(os.getpid(), session.page, session.login, page, dict(session.environment))
            stack.announce(place, up)
            print(f"{up.pages}\nCtrl-C ends both", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                session.serve(lambda line: print(line, flush=True), ended)
    return OK


def requested_addresses(options: argparse.Namespace) -> dict[str, int | str]:
    """Return the addresses that the user requests, and which the run home stores.

    Raises:
        ConfigError: an address cannot be used.
    """
    ports = {"prefect": options.prefect_port, "mlflow": options.mlflow_port, "ray": options.ray_port}
    given = {
        name: port for name, port in ports.items() if port is not None and port != read_addresses(run_home()).get(name)
    }
    for name, port in given.items():
        if not is_free(port):
            raise ConfigError(f"--{name}-port {port}: something listens there already; give another port")
    if options.database is not None and options.database != read_addresses(run_home()).get("database"):
        if urlsplit(options.database).password:
            raise ConfigError(
                f"--database {redact(options.database)!r} has a password, and the home keeps the address: "
                "take it out, and set PGPASSWORD"
            )
        given["database"] = options.database
    if is_held(run_home() / "prefect" / "holder") and given.keys() & {"prefect", "database"}:
        raise ConfigError(
            f"a command uses the Prefect server of {run_home()}; its address and database can change once that command "
            "ends"
        )
    return given
