"""Starts Prefect flow runs as forks of a process that has already imported rollflow, because a new interpreter would
need seconds for the imports.

    runner --before it has threads--> fork server --for each flow run--> flow run

Guarantees:
- A forked flow run behaves like a process of `python -m prefect.engine`: same environment, working folder, output,
  signals and exit code. Each flow run is a process of its own; its command line has the flow run's id at the end (see
  `process_title`).
- A flow run ends when the fork server ends, and the fork server ends when the runner ends. The runner gets the flow
  run's exit code.
- A dead fork server is replaced by a new one: see `tasks.runtime.fork_server`.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import anyio
from prefect.context import refresh_global_settings_context
from prefect.runner import _starter_engine
from prefect.utilities.processutils import get_sys_executable

from rollflow.flows.services.process_title import ENGINE, FLOW_RUN
from rollflow.tasks.runtime.fork_server import be_named, fork_server, leave_alive_to_owner

PR_SET_PDEATHSIG = 1


def fork_flows(module: str) -> None:
    """Make the Prefect runner of this process fork its flow runs from a fork server that has imported `module`."""
    if not sys.platform.startswith("linux"):
        return
    # title of the fork server's process, which distinguishes it from the runner's process
    shown_as = (sys.executable, "-m", forkserver.__name__)
    fork_server([module, __name__], shown_as=shown_as)
    # A comment in Prefect's code asks users to replace this function by a patch.
    setattr(_starter_engine, "run_process", _run_process)  # noqa: B010


async def _run_process(
    command: list[str],
    *,
    task_status: anyio.abc.TaskStatus[Any],
    task_status_handler: Callable[[Any], Any],
    env: Mapping[str, str],
    cwd: Path | str | None = None,
    **_: object,
) -> ForkServerProcess:
    """Fork a Prefect flow run and wait for its end; terminate the flow run's process on cancellation."""
    if command != [get_sys_executable(), "-m", ENGINE]:
        raise NotImplementedError(
            f"only flow runs of this Prefect runner can be started as forked processes, not {command}"
        )
    context = multiprocessing.get_context("forkserver")
    forkserver.ensure_running()
    given = (forkserver._forkserver._forkserver_pid, dict(env), None if cwd is None else str(cwd))  # type: ignore[attr-defined]
    process = context.Process(target=_run_flow, args=given)
    # called in this thread, because two threads that wait for child processes could take each other's exit codes
    process.start()
    try:
        task_status.started(task_status_handler(process))
        await anyio.wait_readable(process.sentinel)
    finally:
        if process.exitcode is None:
            process.terminate()
            with anyio.CancelScope(shield=True):
                await anyio.wait_readable(process.sentinel)
        process.join()
    return process


def _run_flow(server: int, environment: dict[str, str], folder: str | None) -> None:
    """Execute a Prefect flow run in a forked process, as `python -m prefect.engine` does."""
    _die_with(server)
    os.environ.clear()
    os.environ.update(environment)
    if folder:
        os.chdir(folder)
    sys.argv = [ENGINE]
    sys.modules.pop(ENGINE, None)  # remove the module, because Prefect's engine must be executed as the main module
    be_named(sys.executable, "-m", ENGINE, environment[FLOW_RUN])
    refresh_global_settings_context()
    try:
        runpy.run_module(ENGINE, run_name="__main__", alter_sys=True)
    finally:  # `multiprocessing` would end the process without calling the interpreter's exit functions
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _die_with(server: int) -> None:
    """Make this process die with its fork server; otherwise Prefect's runner would not notice the flow run's end and
    would start it twice.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:  # the fork server died before the call of `prctl`
        os._exit(1)
    leave_alive_to_owner()
