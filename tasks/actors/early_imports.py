"""What a Ray worker imports before it becomes an actor, where it is told of what kind.

A *spare* was started before there was a run (`flows.services.spares`). It makes all imports of its kind, and then an
actor of that kind begins in it. A worker that is started for an actor makes imports for an engine only: the others are
asked for their status meanwhile, and who asks waits only so long.

With GPUs nothing is imported early: which of them an actor has is told to it when it begins, and libraries look before.
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
KIND = "ROLLFLOW_IMPORTS"  # in the environment of a worker: the kind of its actor
WANTED = "ROLLFLOW_SPARES"  # in that of a private cluster: the folder where spares are asked for, a file for each kind
IMPORTING = ".importing"  # a lock beside that file, held by who imports
POLL_SECONDS = 0.1
LONGEST_SECONDS = 300.0  # that a worker waits for the imports of another one, for an engine
SHORT_SECONDS = 15.0  # and for the others, whom somebody asks for their status
REGISTER_SECONDS = 1.0  # from the end of the imports until Ray knows the worker
MODULES: dict[Kind, tuple[str, ...]] = {
    "engine": ("rollflow.tasks.actors.rollout",),
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


def kinds_of(config: RunConfig) -> tuple[Kind, ...]:
    """The kinds of workers that a run waits for, where there are no GPUs; the one that has most to do first."""
    if config.cluster.env or config.cluster.runtime_env:
        return ()  # its workers have another environment
    return ("learner", "engine") if imports_vllm(config.engine) else ("learner",)


def imports_vllm(engine: EngineConfig) -> bool:
    """Whether the imports of kind "engine" are what this engine needs."""
    return engine.kind == "vllm" and engine.threads == 1


def environment(kind: Kind) -> dict[str, Any]:
    """Ray's `runtime_env` of a worker of this kind."""
    return {"env_vars": {KIND: kind}}


def wanted(kind: Kind, folder: Path) -> Path:
    """The file that asks for a spare: who removes it is one."""
    return folder / kind


def import_early() -> None:
    """Import a worker's libraries before Ray starts threads in it.

    Raises nothing: a worker that ends before it registers keeps its actor waiting. If an import fails here, it fails
    again in the actor.
    """
    kind, folder = os.environ.get(KIND), os.environ.get(WANTED)
    if kind not in MODULES or folder is None or glob.glob("/dev/nvidia[0-9]*"):
        return
    try:
        _import_in_turn(kind, wanted(kind, Path(folder)))
    except Exception:
        logging.getLogger(__name__).exception("early imports of %s", kind)


def _import_in_turn(kind: Kind, file: Path) -> None:
    """Import as a spare if one is asked for; otherwise only for an engine, and only if no spare is importing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        file.unlink()
    except FileNotFoundError:  # a worker for an actor that waits
        if _left_to_spare(kind, file.with_suffix(IMPORTING)) or kind != "engine":
            return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as Ray says to an actor that asks for no CPUs; torch reads it once
    with _told(file.with_suffix(IMPORTING)):
        import_all(kind)


@contextlib.contextmanager
def _told(file: Path) -> Iterator[None]:
    """Let others of this kind know that one imports."""
    held = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(held, fcntl.LOCK_SH)
    try:
        yield
    finally:
        fcntl.flock(held, fcntl.LOCK_UN)  # a copy of this process has the file, too, and closing would not free it
        os.close(held)


def _left_to_spare(kind: Kind, file: Path) -> bool:
    """Wait where another of this kind imports: the actor is to be that one's, and this one needs no imports then."""
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
    """The imports of a kind."""
    if kind == "engine":
        from rollflow.tasks.engines.vllm import import_early

        import_early()
    with quick_imports() if kind == "learner" else contextlib.nullcontext():
        for module in MODULES[kind]:
            import_module(module)
