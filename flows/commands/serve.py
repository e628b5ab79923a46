"""`rollflow serve`: start runs from the Prefect UI, compare them in MLflow."""

from __future__ import annotations

import argparse
import contextlib
import signal
import threading

from rollflow.flows.commands import OK
from rollflow.flows.locations import home
from rollflow.flows.services.prefect_api import SERVED
from rollflow.flows.services.process import MlflowServer
from rollflow.flows.session import open_session
from rollflow.flows.views.tracking import VIEW


def command(_: argparse.Namespace) -> int:
    """Serve the deployments and both UIs until Ctrl-C."""
    mlflow = MlflowServer(home())
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with open_session(SERVED, "auto", mlflow) as session:
        pages = f"Prefect {session.page}/deployments{session.login}\nMLflow  {mlflow.url}/#/experiments{VIEW}"
        print(f"{pages}\nCtrl-C ends both", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            session.serve(lambda line: print(line, flush=True), ended)
    return OK
