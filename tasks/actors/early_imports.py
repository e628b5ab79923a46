"""Imports modules in a Ray worker process before an actor starts in the process.

A *spare* is a worker process that is started before any run needs the process (`flows.services.spares`). A spare
imports all modules of one kind of actor, and later an actor of this kind starts in the spare. A worker process that Ray
starts for a waiting actor imports modules early only if the actor is an engine. Other actors than engines start without
early imports, because callers wait only a limited time for an actor's status.

On a machine with GPUs no module is imported early, because libraries read the list of GPUs on import, before the actor
knows its GPUs.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import logging
import os
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from rollflow.tasks.engines.config import EngineConfig
from rollflow.tasks.policies.optional_libraries import disable_optional_libraries
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.gc_tuning import pause_collector

Kind = Literal["engine", "learner", "rollout", "reward"]
KIND = "ROLLFLOW_IMPORTS"  # environment variable of a worker process that names the kind of its actor
WANTED = "ROLLFLOW_SPARES"  # environment variable that names the folder of the spares' request files
IMPORTING = ".importing"  # suffix of the file that a worker locks while it imports
POLL_SECONDS = 0.1
LONGEST_SECONDS = 300.0  # longest wait of an engine's worker for another worker's imports
SHORT_SECONDS = 15.0  # longest wait of other workers for another worker's imports
REGISTER_SECONDS = 1.0  # seconds after a worker's imports until Ray knows the worker
MODULES: dict[Kind, tuple[str, ...]] = {
    "engine": ("rollflow.tasks.actors.run_engines",),
    "learner": (
        "rollflow.tasks.actors.learner",
        "rollflow.tasks.learners.torch_learner",
        "rollflow.tasks.policies.cold_start",
        "transformers.models.llama.modeling_llama",
        "transformers.models.qwen2.modeling_qwen2",
        "reasoning_gym",
    ),
    "rollout": ("rollflow.tasks.actors.rollout", "reasoning_gym"),
    "reward": ("rollflow.tasks.actors.reward",),
}


def list_kinds(config: RunConfig) -> tuple[Kind, ...]:
    """List the kinds of workers for which a run without GPUs uses early imports, slowest first."""
    if config.cluster.env or config.cluster.runtime_env:
        return ()  # workers with an own environment import nothing early
    return ("learner", "engine") if imports_vllm(config.engine) else ("learner",)


def imports_vllm(engine: EngineConfig) -> bool:
    """Return whether an engine needs the early imports of the kind "engine"."""
    return engine.kind == "vllm" and engine.threads == 1


def worker_environment(kind: Kind) -> dict[str, Any]:
    """Return Ray's `runtime_env` for a worker of this kind."""
    return {"env_vars": {KIND: kind}}


def request_path(kind: Kind, folder: Path) -> Path:
    """Return the path of the file that requests a spare; the worker that deletes the file becomes the spare."""
    return folder / kind


def import_early() -> None:
    """Import a worker's libraries before Ray starts threads in the worker.

    The function raises no error, because an actor would wait forever for a worker that ended before registering with
    Ray. An import that fails early fails again in the actor, which reports the error.
    """
    kind, folder = os.environ.get(KIND), os.environ.get(WANTED)
    if kind not in MODULES or folder is None or glob.glob("/dev/nvidia[0-9]*"):
        return
    try:
        _import_in_turn(kind, request_path(kind, Path(folder)))
    except Exception:
        logging.getLogger(__name__).exception("early imports of %s", kind)


def _import_in_turn(kind: Kind, file: Path) -> None:
    """Import the modules of a kind if this worker process becomes a spare or is meant for an engine.

    A worker for an engine imports nothing if an engine's spare is already importing.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        file.unlink()
    except FileNotFoundError:  # Ray started this worker for a waiting actor
        if _wait_for_spare(kind, file.with_suffix(IMPORTING)) or kind != "engine":
            return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # Ray's value for an actor without CPUs; torch reads it once
    with _hold_import_lock(file.with_suffix(IMPORTING)):
        import_all(kind)


@contextlib.contextmanager
def _hold_import_lock(file: Path) -> Iterator[None]:
    """Lock `file` for the duration of a block, which shows workers of the same kind that this worker is importing."""
    held = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(held, fcntl.LOCK_SH)
    try:
        yield
    finally:
        fcntl.flock(held, fcntl.LOCK_UN)  # a forked process may have the file open
        os.close(held)


def _wait_for_spare(kind: Kind, file: Path) -> bool:
    """Wait while another worker of this kind imports; return whether the waiting actor can start there."""
    held, waited = os.open(file, os.O_RDWR | os.O_CREAT, 0o600), False
    try:
        limit = time.monotonic() + (LONGEST_SECONDS if kind == "engine" else SHORT_SECONDS)
        while time.monotonic() < limit:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            waited = True
            time.sleep(POLL_SECONDS)
    finally:
        os.close(held)
    if waited:
        time.sleep(REGISTER_SECONDS)
    return waited


def import_all(kind: Kind) -> None:
    """Import all modules of a kind."""
    if kind == "engine":
        from rollflow.tasks.engines.vllm import import_early

        import_early()
    with pause_collector():
        if kind == "learner":
            disable_optional_libraries()
        for module in MODULES[kind]:
            import_module(module)
