"""`rollflow down`: ends the servers that `rollflow up` started in this home, and keeps their data."""

from __future__ import annotations

import argparse

from rollflow.flows.commands import OK
from rollflow.flows.locations import run_home
from rollflow.flows.services import stack


def command(_: argparse.Namespace) -> int:
    """End the servers of this home, if they are up."""
    print("down" if stack.end(run_home()) else f"nothing is up in {run_home()}")
    return OK
