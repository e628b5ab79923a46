"""CPU seconds of a session: the command, and the services and flows that it started.

Actors tell their own in their status, wherever they are, so they are left out here, with all below them. Not counted:
a process's time after the last look at it, services that somebody else runs, and Ray's own processes elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import psutil

from rollflow.flows.keepalive.services import RAY, RUNNER
from rollflow.flows.services.process import Service
from rollflow.flows.services.process_title import flow_run_of
from rollflow.storage.run_records.usage import Cost
from rollflow.tasks.runtime.cpu import below_cost, own_cost

COMMAND, SUPERVISOR, STAGES = "command", "supervisor", "stage flows"


def session_costs(services: Mapping[str, Service], supervisor: str) -> Iterator[Cost]:
    """What this process and all below it have used so far. `supervisor` is the id of its flow run."""
    yield own_cost(COMMAND, psutil.Process())
    for role, service in services.items():
        if (pid := service.pid) <= 0:
            continue  # it is down, or another command's
        with contextlib.suppress(psutil.Error):
            guard = psutil.Process(pid)
            if role == RUNNER:
                yield from _flows(guard, supervisor)
            elif role == RAY:
                yield from _ray(guard)
            else:
                yield below_cost(role, guard)


def _flows(guard: psutil.Process, supervisor: str) -> Iterator[Cost]:
    """The runner and its flows, each for itself: what ended is no cost of the runner's."""
    for process in guard.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            flow_run = flow_run_of(process)
            role = RUNNER if flow_run is None else SUPERVISOR if flow_run == supervisor else STAGES
            yield own_cost(role, process)


def _ray(guard: psutil.Process) -> Iterator[Cost]:
    """Ray's own processes; not the actors, nor what they started."""
    actors: set[int] = set()
    for process in sorted(guard.children(recursive=True), key=lambda one: one.create_time()):  # parents are older
        with contextlib.suppress(psutil.Error):
            # One that is ending has no command line any more.
            if process.ppid() in actors or "Actor" in "".join(process.cmdline()[:1]):
                actors.add(process.pid)
            else:
                yield own_cost(RAY, process)
