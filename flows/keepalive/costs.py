"""Measures the CPU seconds that a command such as `rollflow run` uses, including the services and Prefect flows that
the command started.

Ray actors and their child processes are not measured here, because each actor reports its own CPU seconds in its
status. The CPU time of services that another command started is left out, and so is that of Ray's own processes on
other nodes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import psutil

from rollflow.flows.keepalive.services import RAY, RUNNER
from rollflow.flows.services.process import Service
from rollflow.flows.services.process_title import flow_run_of
from rollflow.storage.run_records.usage import CpuCost
from rollflow.tasks.runtime.cpu import below_cost, own_cost

COMMAND, SUPERVISOR, STAGES = "command", "supervisor", "stage flows"


def session_costs(services: Mapping[str, Service], supervisor: str) -> Iterator[CpuCost]:
    """Yield the CPU seconds that this process and the process trees of its services have used so far. `supervisor` is
    the id of the Prefect flow run that supervises the training run.
    """
    yield own_cost(COMMAND, psutil.Process())
    for role, service in services.items():
        if (pid := service.pid) <= 0:
            continue  # The service is down, or another command started it.
        with contextlib.suppress(psutil.Error):
            guard = psutil.Process(pid)
            if role == RUNNER:
                yield from _flow_costs(guard, supervisor)
            elif role == RAY:
                yield from _ray_costs(guard)
            else:
                yield below_cost(role, guard)


def _flow_costs(guard: psutil.Process, supervisor: str) -> Iterator[CpuCost]:
    """Yield the CPU costs of the Prefect runner and of each flow process separately. Because each flow process is
    measured separately, the costs of an ended flow are not added to the runner's costs.
    """
    for process in guard.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            flow_run = flow_run_of(process)
            role = RUNNER if flow_run is None else SUPERVISOR if flow_run == supervisor else STAGES
            yield own_cost(role, process)


def _ray_costs(guard: psutil.Process) -> Iterator[CpuCost]:
    """Yield the CPU costs of Ray's own processes, without the Ray actors and their child processes."""
    actors: set[int] = set()
    # Sort the processes by their creation times, so that a parent process comes before its children.
    for process in sorted(guard.children(recursive=True), key=lambda process: process.create_time()):
        with contextlib.suppress(psutil.Error):
            # A process that is ending has no command line.
            if process.ppid() in actors or "Actor" in "".join(process.cmdline()[:1]):
                actors.add(process.pid)
            else:
                yield own_cost(RAY, process)
