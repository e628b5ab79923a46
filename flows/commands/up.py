"""`rollflow up`: what `rollflow serve` serves, in the background, until `rollflow down`."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from rollflow.flows.commands import FAILED, OK
from rollflow.flows.commands.serve import asked
from rollflow.flows.locations import home
from rollflow.flows.services import stack
from rollflow.flows.services.locks import is_held

START_SECONDS = 300.0
POLL_SECONDS = 0.1


def command(options: argparse.Namespace) -> int:
    """Start it and wait until it serves; one that is up is found, and said."""
    place, limit = home(), time.monotonic() + START_SECONDS
    while _begun(place) and time.monotonic() < limit:  # one that is starting is waited for
        if found := stack.find(place):
            print(f"up already\n{found.pages}")
            return OK
        time.sleep(POLL_SECONDS)
    asked(options)
    log = place / "logs" / "up.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        begun = output.tell()
        serving = subprocess.Popen(
            [sys.executable, "-m", "rollflow.flows.keepalive.stack", *_arguments(options)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        while serving.poll() is None and time.monotonic() < limit:
            if up := stack.find(place):
                print(f"{up.pages}\n`rollflow down` ends both; the log is {log}")
                return OK
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        serving.terminate()
        raise
    if serving.poll() is not None and _begun(place):  # another one, which began at the same time
        return command(options)
    serving.terminate()
    said = log.read_bytes()[begun:].decode(errors="replace").strip()
    print(f"rollflow: it did not come up; see {log}\n{said[-2000:]}", file=sys.stderr)
    return serving.returncode or FAILED


def _begun(place: Path) -> bool:
    return is_held(place / "up.lock") or is_held(place / stack.KEEPER)


def _arguments(options: argparse.Namespace) -> list[str]:
    given = {name: getattr(options, name) for name in ("prefect_port", "mlflow_port", "ray_port", "database")}
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
