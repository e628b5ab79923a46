"""Recognizes a flow run's process by its command line."""

from __future__ import annotations

import psutil

ENGINE = "prefect.engine"
FLOW_RUN = "PREFECT__FLOW_RUN_ID"


def flow_run_of(process: psutil.Process) -> str | None:
    """Return the id of the flow run that a process executes, or None if it executes none.

    A flow run forked by `flow_process` has the id as the last word of its command line; other flow runs have it in
    their environment.
    """
    line: list[str] = process.cmdline()
    if line[1:3] != ["-m", ENGINE]:
        return None
    flow_run: str | None = line[3] if len(line) > 3 and line[3] else process.environ().get(FLOW_RUN)
    return flow_run
