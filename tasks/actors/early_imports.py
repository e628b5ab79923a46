"""Early imports: the modules that a Ray worker process imports before an actor starts in that process.

A *spare* is a worker that is started before any run needs it (`flows.services.spares`). A spare imports all modules of
its kind, and then an actor of that kind starts in the spare. A worker that Ray starts for a waiting actor imports
modules early only if the actor is an engine. Actors other than engines start at once, because callers wait only a
limited time for their status.

On a machine with GPUs no module is imported early: an actor learns which GPUs it has when it starts, and libraries read
the list of GPUs when they are imported.
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
from rollflow.tasks.policies.quick_imports import quick_imports
from rollflow.tasks.run.config import RunConfig

Kind = Literal["engine", "learner", "rollout", "reward"]
KIND = "ROLLFLOW_IMPORTS"  # environment variable of a worker: the kind of its actor
WANTED = "ROLLFLOW_SPARES"  # environment variable of a private cluster: the folder with a request file for each kind
IMPORTING = ".importing"  # suffix of the lock file that a worker holds while it imports
POLL_SECONDS = 0.1
LONGEST_SECONDS = 300.0  # most seconds that an engine's worker waits for the imports of another worker
SHORT_SECONDS = 15.0  # most seconds that any other worker waits for the imports of another worker
REGISTER_SECONDS = 1.0  # seconds from the end of a worker's imports until Ray knows the worker
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
    """List the kinds of workers that a run needs where there are no GPUs, the slowest to start first."""
    if config.cluster.env or config.cluster.runtime_env:
        return ()  # the workers of such a run have a different environment
    return ("learner", "engine") if imports_vllm(config.engine) else ("learner",)


def imports_vllm(engine: EngineConfig) -> bool:
    """Return whether this engine needs the imports of kind "engine"."""
    return engine.kind == "vllm" and engine.threads == 1


def worker_environment(kind: Kind) -> dict[str, Any]:
    """Return Ray's `runtime_env` of a worker of this kind."""
    return {"env_vars": {KIND: kind}}


def request_path(kind: Kind, folder: Path) -> Path:
    """Return the file that requests a spare; the worker that removes it becomes the spare."""
    return folder / kind


def import_early() -> None:
    """Import a worker's libraries before Ray starts threads in the worker.

    This function raises no error, because an actor would wait for a worker that ends before it registers with Ray. An
    import that fails in this function fails again, visibly, in the actor.
    """
    kind, folder = os.environ.get(KIND), os.environ.get(WANTED)
    if kind not in MODULES or folder is None or glob.glob("/dev/nvidia[0-9]*"):
        return
    try:
        _import_in_turn(kind, request_path(kind, Path(folder)))
    except Exception:
        logging.getLogger(__name__).exception("early imports of %s", kind)


def _import_in_turn(kind: Kind, file: Path) -> None:
    """Import the modules of a kind, if this worker becomes a spare or is the worker of an engine.

    An engine's worker imports nothing while a spare of its kind is importing.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        file.unlink()
    except FileNotFoundError:  # this worker was started for an actor that waits
        if _wait_for_spare(kind, file.with_suffix(IMPORTING)) or kind != "engine":
            return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # Ray's value for an actor without CPUs; torch reads it only once
    with _hold_import_lock(file.with_suffix(IMPORTING)):
        import_all(kind)


@contextlib.contextmanager
def _hold_import_lock(file: Path) -> Iterator[None]:
    """Hold the lock that shows other workers of this kind that this worker is importing."""
    held = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(held, fcntl.LOCK_SH)
    try:
        yield
    finally:
        fcntl.flock(held, fcntl.LOCK_UN)  # a forked copy of this process has the file open, so closing is not enough
        os.close(held)


def _wait_for_spare(kind: Kind, file: Path) -> bool:
    """Wait while another worker of this kind imports; return whether the actor can start in that other worker."""
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
    with quick_imports() if kind == "learner" else contextlib.nullcontext():
        for module in MODULES[kind]:
            import_module(module)
