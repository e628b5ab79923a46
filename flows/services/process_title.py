"""Recognizes the process of a Prefect flow run by the process's command line."""

from __future__ import annotations

import psutil

ENGINE = "prefect.engine"
FLOW_RUN = "PREFECT__FLOW_RUN_ID"


def flow_run_of(process: psutil.Process) -> str | None:
    """Return the id of the Prefect flow run that a process executes, or None if the process executes none.

    The id is the last word of the command line if `flow_process` forked the process; otherwise it is in the process's
    environment.
    """
    line: list[str] = process.cmdline()
    if line[1:3] != ["-m", ENGINE]:
        return None
    flow_run: str | None = line[3] if len(line) > 3 and line[3] else process.environ().get(FLOW_RUN)
    return flow_run
