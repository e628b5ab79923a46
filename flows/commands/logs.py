"""`rollflow logs [RUN]`: what the flows of a run said, and what was written to their output, on this machine.

A command that runs it has a log for it alone. `rollflow serve` (`up`) has one for all runs: of that one, the lines are
shown that say that they are of this run.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from rollflow.flows.commands import OK
from rollflow.flows.locations import find_run, home
from rollflow.flows.services.prefect_api import SERVED
from rollflow.flows.views.log_lines import as_json, is_of, text
from rollflow.flows.views.status import read_status
from rollflow.storage.errors import ConfigError
from rollflow.tasks.run.context import RunContext

LOOK_SECONDS = 0.5


def command(options: argparse.Namespace) -> int:
    """Print the log, and with `--follow` what is added to it until the run has ended.

    Raises:
        ConfigError: the run was at work elsewhere.
    """
    context = find_run(options.run, options.store)
    context.created  # noqa: B018 - says which run is not there
    found = False
    for line in _lines(context, follow=options.follow):
        print(as_json(line, context.run_id) if options.json else text(line), flush=True)
        found = True
    if not found:
        raise ConfigError(
            f"run {context.run_id}: no line in {home() / 'logs'} is of it; "
            "look where it was started, or at its page in Prefect"
        )
    return OK


def _log_files(context: RunContext) -> dict[Path, Callable[[str], bool]]:
    """The files that may have lines of it, and which lines of each are its own: it may have been run in both ways."""
    logs = home() / "logs"
    wanted = {
        logs / context.key / "runner.log": lambda line: True,
        logs / SERVED / "runner.log": lambda line: is_of(line, context.run_id),
    }
    return {file: own for file, own in wanted.items() if file.exists()}


def _lines(context: RunContext, *, follow: bool) -> Iterator[str]:
    """Its lines, with `follow` as they are written until it has ended."""
    wanted = _log_files(context)
    with contextlib.ExitStack() as opened:
        logs = [_Log(opened.enter_context(file.open(errors="replace")), own) for file, own in wanted.items()]
        ended, first = not (follow and logs), True
        while True:
            ended = ended or ((status := read_status(context)) is not None and status.ended)
            new = [line for log in logs for line in log.new(ended=ended)]
            yield from new
            if ended:
                return
            if first and not new:
                print(
                    f"run {context.run_id} has no line in {home() / 'logs'} yet; Ctrl-C ends the wait", file=sys.stderr
                )
            first = False
            time.sleep(LOOK_SECONDS)


class _Log:
    """A file that is being written."""

    def __init__(self, file: TextIO, own: Callable[[str], bool]) -> None:
        self._file, self._own = file, own
        self._begun = ""

    def new(self, *, ended: bool) -> Sequence[str]:
        """The run's whole lines since the last look; of one that has `ended` the last one as it is."""
        *lines, self._begun = (self._begun + self._file.read()).split("\n")
        last = [self._begun] if ended and self._begun else []
        return [line for line in lines + last if self._own(line)]
