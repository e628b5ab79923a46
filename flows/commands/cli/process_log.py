"""Implements `rollflow log --processes`, which prints the log lines that a run's processes wrote on this machine.
`rollflow run` writes one log file for its run; `rollflow serve` writes one file for all runs, and this module prints
only the lines of the run that the user names.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from rollflow.flows.locations import run_home
from rollflow.flows.registration.prefect_api import SERVED
from rollflow.flows.views.log_lines import as_json as line_as_json
from rollflow.flows.views.log_lines import format_line, is_of
from rollflow.flows.views.status import read_status
from rollflow.storage.errors import ConfigError
from rollflow.tasks.run.context import RunContext

LOOK_SECONDS = 0.5


def print_process_log(context: RunContext, *, follow: bool, as_json: bool) -> None:
    """Print the log lines of the run's processes. If `follow` is true, print new lines until the run has ended.

    Raises:
        ConfigError: this machine has no log line of the run.
    """
    context.created  # noqa: B018 - says which run is not there
    found = False
    for line in _read_lines(context, follow=follow):
        print(line_as_json(line, context.run_id) if as_json else format_line(line), flush=True)
        found = True
    if not found:
        raise ConfigError(
            f"the log files in {run_home() / 'logs'} have no line of run {context.run_id}; use the machine on "
            "which the run was started, or the run's page in Prefect"
        )


def _log_files(context: RunContext) -> dict[Path, Callable[[str], bool]]:
    """Return the log files that may contain lines of the run, each with a function that selects the run's lines."""
    logs = run_home() / "logs"
    wanted = {
        logs / context.key / "runner.log": lambda line: True,
        logs / SERVED / "runner.log": lambda line: is_of(line, context.run_id),
    }
    return {file: own for file, own in wanted.items() if file.exists()}


def _read_lines(context: RunContext, *, follow: bool) -> Iterator[str]:
    """Yield the log lines of the run. If `follow` is true, yield new lines until the run has ended."""
    wanted = _log_files(context)
    with contextlib.ExitStack() as opened:
        logs = [_Log(opened.enter_context(file.open(errors="replace")), own) for file, own in wanted.items()]
        ended, first = not (follow and logs), True
        while True:
            ended = ended or ((status := read_status(context)) is not None and status.ended)
            new = [line for log in logs for line in log.read_new(ended=ended)]
            yield from new
            if ended:
                return
            if first and not new:
                print(
                    f"run {context.run_id} has no line in {run_home() / 'logs'} yet; Ctrl-C ends the wait",
                    file=sys.stderr,
                )
            first = False
            time.sleep(LOOK_SECONDS)


class _Log:
    """Reads the new lines of a log file to which a process still writes."""

    def __init__(self, file: TextIO, own: Callable[[str], bool]) -> None:
        self._file, self._own = file, own
        self._begun = ""

    def read_new(self, *, ended: bool) -> Sequence[str]:
        """Return the complete log lines that the run's processes wrote since the last call. If `ended` is true, include
        an incomplete last line of the log file.
        """
        *lines, self._begun = (self._begun + self._file.read()).split("\n")
        last = [self._begun] if ended and self._begun else []
        return [line for line in lines + last if self._own(line)]
