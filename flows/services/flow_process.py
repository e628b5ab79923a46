"""Flow runs as copies of their runner, which has imported what they need: a new interpreter takes seconds for that.

    runner --before it has threads--> fork server --for each flow run--> flow run

Guarantees:
- A flow run is what `python -m prefect.engine` would be: its environment, folder, output, signals and exit code, a
  process of its own, and the same command line for whoever looks (`process_title`), with the flow run's id behind it.
- It ends with the fork server, and that with the runner; what the runner is told of the end of a flow run is true.
- Where the fork server has died, there is another one: `tasks.fork_server`.
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
    """Have this process, which runs `module`, fork the flow runs that a Prefect runner in it will start."""
    if not sys.platform.startswith("linux"):
        return
    shown_as = (sys.executable, "-m", forkserver.__name__)  # nobody is to take it for the runner
    fork_server([module, __name__], shown_as=shown_as)
    setattr(_starter_engine, "run_process", _run_process)  # noqa: B010 - as it says itself: patch the module to override


async def _run_process(
    command: list[str],
    *,
    task_status: anyio.abc.TaskStatus[Any],
    task_status_handler: Callable[[Any], Any],
    env: Mapping[str, str],
    cwd: Path | str | None = None,
    **_: object,
) -> ForkServerProcess:
    """In the place of Prefect's: returns once the process has ended, and leaves none behind where it is cancelled."""
    if command != [get_sys_executable(), "-m", ENGINE]:
        raise NotImplementedError(f"only flow runs of this runner are forked, not {command}")
    context = multiprocessing.get_context("forkserver")
    forkserver.ensure_running()
    given = (forkserver._forkserver._forkserver_pid, dict(env), None if cwd is None else str(cwd))  # type: ignore[attr-defined]
    process = context.Process(target=_be_flow_run, args=given)
    process.start()  # here, and not in a thread: of two that look for what has ended, one would be told wrong
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


def _be_flow_run(server: int, environment: dict[str, str], folder: str | None) -> None:
    """What `python -m prefect.engine` does, in a copy of the runner."""
    _end_with(server)
    os.environ.clear()
    os.environ.update(environment)
    if folder:
        os.chdir(folder)
    sys.argv = [ENGINE]
    sys.modules.pop(ENGINE, None)  # it is to run as the main module
    be_named(sys.executable, "-m", ENGINE, environment[FLOW_RUN])
    refresh_global_settings_context()
    try:
        runpy.run_module(ENGINE, run_name="__main__", alter_sys=True)
    finally:  # `multiprocessing` ends a process without what an interpreter does at its end
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _end_with(server: int) -> None:
    """Nobody would hear of the end of a flow run whose fork server is gone, and it would be started a second time."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:  # it died before
        os._exit(1)
    leave_alive_to_owner()
