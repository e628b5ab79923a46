"""`rollflow up`: runs `rollflow serve` in the background, until `rollflow down` ends it."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from rollflow.flows.commands import FAILED, OK
from rollflow.flows.commands.serve import requested_addresses
from rollflow.flows.locations import run_home
from rollflow.flows.services import stack
from rollflow.flows.services.locks import is_held

START_SECONDS = 300.0
POLL_SECONDS = 0.1


def command(options: argparse.Namespace) -> int:
    """Start the stack and wait until it serves; only report a stack that is already up."""
    place, limit = run_home(), time.monotonic() + START_SECONDS
    while _is_begun(place) and time.monotonic() < limit:  # wait for a stack that is starting
        if found := stack.find(place):
            print(f"up already\n{found.pages}")
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
                print(f"{up.pages}\n`rollflow down` ends both; the log is {log}")
                return OK
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        serving.terminate()
        raise
    if serving.poll() is not None and _is_begun(place):  # another command started a stack at the same time
        return command(options)
    serving.terminate()
    output = log.read_bytes()[begun:].decode(errors="replace").strip()
    print(f"rollflow: the stack did not come up; see {log}\n{output[-2000:]}", file=sys.stderr)
    return serving.returncode or FAILED


def _is_begun(place: Path) -> bool:
    return is_held(place / "up.lock") or is_held(place / stack.KEEPER)


def _arguments(options: argparse.Namespace) -> list[str]:
    given = {name: getattr(options, name) for name in ("prefect_port", "mlflow_port", "ray_port", "database")}
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
