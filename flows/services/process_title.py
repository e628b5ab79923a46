"""By what one sees from outside that a process is a flow run: its command line."""

from __future__ import annotations

import psutil

ENGINE = "prefect.engine"
FLOW_RUN = "PREFECT__FLOW_RUN_ID"


def flow_run_of(process: psutil.Process) -> str | None:
    """The id of the flow run that a process executes; None where it executes none.

    It is the last word on the command line of one that was forked (`flow_process`); others have it in the environment.
    """
    line: list[str] = process.cmdline()
    if line[1:3] != ["-m", ENGINE]:
        return None
    named: str | None = line[3] if len(line) > 3 and line[3] else process.environ().get(FLOW_RUN)
    return named
