"""`rollflow logs [RUN]`: what the flows of a run said, and what was written to their output, on this machine."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from rollflow.flows.commands import OK
from rollflow.flows.locations import find_run, home
from rollflow.flows.views.log_lines import as_json, text
from rollflow.flows.views.status import read_status
from rollflow.storage.errors import ConfigError
from rollflow.tasks.run_context import RunContext

LOOK_SECONDS = 0.5
SERVED = "rollflow"  # of all runs that `rollflow serve` was asked for


def command(options: argparse.Namespace) -> int:
    """Print the log, and with `--follow` what is added to it until the run has ended."""
    context = find_run(options.run, options.store)
    context.created  # noqa: B018 - says which run is not there
    file = log_file(context)
    for line in _followed(file, context) if options.follow else file.read_text(errors="replace").splitlines():
        print(as_json(line, context.run_id) if options.json else text(line), flush=True)
    return OK


def log_file(context: RunContext) -> Path:
    """That of the command which runs it, or of `rollflow serve`.

    Raises:
        ConfigError: the run was at work elsewhere.
    """
    for name in (context.key, SERVED):
        file = home() / "logs" / name / "runner.log"
        if file.exists():
            return file
    raise ConfigError(
        f"run {context.run_id}: there is no log of it in {home() / 'logs'}; "
        "look where it was started, or at its page in Prefect"
    )


def _followed(file: Path, context: RunContext) -> Iterator[str]:
    """Whole lines, as they are written; the last one as it is."""
    with file.open(errors="replace") as log:
        begun, ended = "", False
        while not ended:
            ended = (status := read_status(context)) is not None and status.ended
            *lines, begun = (begun + log.read()).split("\n")
            yield from lines
            if not ended:
                time.sleep(LOOK_SECONDS)
        if begun:
            yield begun
