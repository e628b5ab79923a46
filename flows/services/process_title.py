"""Recognizes from its command line that a process is a flow run."""

from __future__ import annotations

import psutil

ENGINE = "prefect.engine"
FLOW_RUN = "PREFECT__FLOW_RUN_ID"


def flow_run_of(process: psutil.Process) -> str | None:
    """Return the id of the flow run that a process executes, or None if it executes none.

    A forked process (`flow_process`) has the id as the last word of its command line; others have it in the
    environment.
    """
    line: list[str] = process.cmdline()
    if line[1:3] != ["-m", ENGINE]:
        return None
    flow_run: str | None = line[3] if len(line) > 3 and line[3] else process.environ().get(FLOW_RUN)
    return flow_run
