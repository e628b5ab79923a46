"""Implements `rollflow serve`, which runs a Prefect server, where users start runs, and an MLflow server, where users
compare runs. With `--sandboxes`, `rollflow serve` runs untrusted programs for other processes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from rollflow.flows.commands.cli.exit_codes import FAILED, OK
from rollflow.flows.locations import run_home
from rollflow.flows.registration.prefect_api import SERVED
from rollflow.flows.services import stack
from rollflow.flows.services.home_server import is_free, read_addresses, stable_port, store_addresses
from rollflow.flows.services.locks import is_held
from rollflow.flows.services.process import MlflowServer
from rollflow.flows.services.profile import prefect_url
from rollflow.flows.services.reachability import check_prefect, check_prefect_database, redact
from rollflow.flows.services.stop_flag import StopFlag
from rollflow.storage.errors import ConfigError
from rollflow.tasks.actors.early_imports import MODULES

START_SECONDS = 300.0  # Longest wait in seconds for servers that start in the background.
POLL_SECONDS = 0.1


def command(options: argparse.Namespace) -> int:
    """Run the Prefect server, the MLflow server and the runner, or stop the servers of this machine's run home. With
    `--sandboxes`, serve sandboxes.
    """
    if options.sandboxes is not None:
        # The module is imported late, because it imports uvicorn.
        from rollflow.flows.commands.cli import serve_sandboxes

        return serve_sandboxes.command(options)
    if options.end:
        ended = stack.end(run_home())
        print(f"the servers of {run_home()} {'have ended' if ended else 'are not up'}")
        return OK
    return _serve_in_background(options) if options.background else _serve(options)


def _serve(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    # these imports stand here because Prefect and MLflow take seconds to import
    from rollflow.flows.session import open_session
    from rollflow.flows.tracking.tracking import VIEW

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


def _serve_in_background(options: argparse.Namespace) -> int:
    """Start a background process that runs `rollflow serve` and restarts it after a crash; wait until the servers
    answer. If the servers are already running, only their addresses are printed.
    """
    place, limit = run_home(), time.monotonic() + START_SECONDS
    while _is_begun(place) and time.monotonic() < limit:  # Wait for servers that another command is starting.
        if found := stack.find(place):
            print(f"the servers are up already\n{found.pages}")
            return OK
        time.sleep(POLL_SECONDS)
    requested_addresses(options)
    log = place / "logs" / "up.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as log_file:
        begun = log_file.tell()
        serving = subprocess.Popen(
            [sys.executable, "-m", "rollflow.flows.keepalive.stack", *_arguments(options)],
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,
        )
    try:
        while serving.poll() is None and time.monotonic() < limit:
            if up := stack.find(place):
                print(f"{up.pages}\n`rollflow serve --end` ends both; the log is {log}")
                return OK
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        serving.terminate()
        raise
    if serving.poll() is not None and _is_begun(place):  # Another command started the servers at the same time.
        return _serve_in_background(options)
    serving.terminate()
    output = log.read_bytes()[begun:].decode(errors="replace").strip()
    print(f"rollflow: the servers did not start; see {log}\n{output[-2000:]}", file=sys.stderr)
    return serving.returncode or FAILED


def _is_begun(place: Path) -> bool:
    return is_held(place / "up.lock") or is_held(place / stack.KEEPER)


def _arguments(options: argparse.Namespace) -> list[str]:
    given = {name: getattr(options, name) for name in ("prefect_port", "mlflow_port", "ray_port", "database")}
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]


def requested_addresses(options: argparse.Namespace) -> dict[str, int | str]:
    """Return the ports and the database that the user requests for the servers.

    Raises:
        ConfigError: a port or the database cannot be used.
    """
    ports = {"prefect": options.prefect_port, "mlflow": options.mlflow_port, "ray": options.ray_port}
    given = {
        name: port for name, port in ports.items() if port is not None and port != read_addresses(run_home()).get(name)
    }
    for name, port in given.items():
        if not is_free(port):
            raise ConfigError(f"--{name}-port {port}: another process uses this port; give another one")
    if options.database is not None and options.database != read_addresses(run_home()).get("database"):
        if urlsplit(options.database).password:
            raise ConfigError(
                f"--database {redact(options.database)!r} has a password, which would be stored in the run "
                "home; remove the password, and set PGPASSWORD"
            )
        given["database"] = options.database
    if is_held(run_home() / "prefect" / "holder") and given.keys() & {"prefect", "database"}:
        raise ConfigError(
            f"the port or database cannot change now, because a command uses the Prefect server of {run_home()}; "
            "try again when the command has ended"
        )
    return given
