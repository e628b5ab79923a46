"""Imports modules in a Ray worker process before an actor starts in it.

A *spare* is a worker process that Ray starts in advance (`flows.services.spares`), and that imports the modules of one
kind of actor. Without a spare, only the worker process of an engine imports modules early.

On a machine with GPUs nothing is imported early, because libraries would read the list of GPUs before Ray has assigned
any.
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
KIND = "ROLLFLOW_IMPORTS"  # environment variable of a worker process: the kind of actor that the process will host
WANTED = "ROLLFLOW_SPARES"  # environment variable: the folder of the files that request spare workers
IMPORTING = ".importing"  # suffix of the file that a worker process locks while it imports modules
POLL_SECONDS = 0.1
LONGEST_SECONDS = 300.0  # longest time, in seconds, that an engine's worker waits for another worker's imports
SHORT_SECONDS = 15.0  # longest time, in seconds, that any other worker waits for another worker's imports
REGISTER_SECONDS = 1.0  # seconds from the end of a worker's imports until Ray has registered the worker
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
    """List the kinds of actors whose modules are imported early in a run without GPUs, slowest import first."""
    if config.cluster.env or config.cluster.runtime_env:
        return ()  # workers with a user-defined environment import nothing early
    return ("learner", "engine") if imports_vllm(config.engine) else ("learner",)


def imports_vllm(engine: EngineConfig) -> bool:
    """Return whether an engine's worker process should import vLLM before the engine's actor starts."""
    return engine.kind == "vllm" and engine.threads == 1


def worker_environment(kind: Kind) -> dict[str, Any]:
    """Return Ray's `runtime_env` for a worker process that hosts an actor of this kind."""
    return {"env_vars": {KIND: kind}}


def request_path(kind: Kind, folder: Path) -> Path:
    """Return the path of the file that requests a spare worker.

    The worker process that deletes the file becomes the spare.
    """
    return folder / kind


def import_early() -> None:
    """Import the libraries of a Ray worker process before Ray starts threads in it.

    `import_early` raises no error, because an actor would wait forever for a worker process that ended too early. A
    failed import fails again in the actor, which reports the error.
    """
    kind, folder = os.environ.get(KIND), os.environ.get(WANTED)
    if kind not in MODULES or folder is None or glob.glob("/dev/nvidia[0-9]*"):
        return
    try:
        _import_in_turn(kind, request_path(kind, Path(folder)))
    except Exception:
        logging.getLogger(__name__).exception("early imports of %s", kind)


def _import_in_turn(kind: Kind, file: Path) -> None:
    """Import the modules of an actor kind if this worker process becomes a spare or is meant for an engine.

    An engine's worker process imports nothing if a spare already imports the same modules.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        file.unlink()
    except FileNotFoundError:  # no file requests a spare, so Ray started this worker for a waiting actor
        if _wait_for_spare(kind, file.with_suffix(IMPORTING)) or kind != "engine":
            return
    # Ray sets OMP_NUM_THREADS to 1 for an actor without CPUs, and torch reads the variable only once.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with _hold_import_lock(file.with_suffix(IMPORTING)):
        import_all(kind)


@contextlib.contextmanager
def _hold_import_lock(file: Path) -> Iterator[None]:
    """Lock `file` while this worker process imports modules, so that other workers of the same kind can wait for it."""
    held = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(held, fcntl.LOCK_SH)
    try:
        yield
    finally:
        # Closing the file would not unlock it while a forked process has the file open.
        fcntl.flock(held, fcntl.LOCK_UN)
        os.close(held)


def _wait_for_spare(kind: Kind, file: Path) -> bool:
    """Wait while another worker process of this kind imports modules; return True if there was one, because it can host
    the actor.
    """
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
    """Import the modules of a kind of actor."""
    if kind == "engine":
        from rollflow.tasks.engines.vllm.engine import import_early

        import_early()
    with pause_collector():
        if kind == "learner":
            disable_optional_libraries()
        for module in MODULES[kind]:
            import_module(module)
