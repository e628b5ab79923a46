"""Checks, before a run begins, that the environment of a config can be created in a worker process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from rollflow.storage.errors import ConfigError
from rollflow.tasks.environments.foreign.config import ForeignEnvironment
from rollflow.tasks.environments.foreign.faults import WorldEnded
from rollflow.tasks.environments.foreign.play import ForeignEpisodes

T = TypeVar("T")


def check_environment(config: ForeignEnvironment) -> None:
    """Create the environment in a worker process as an episode does, with the deadlines of the config.

    Raises:
        ConfigError: the environment cannot be created; the message says what the user must change.
    """
    if config.interpreter and not os.access(config.interpreter, os.X_OK):
        what = f"environment.interpreter = {config.interpreter!r}"
        raise ConfigError(f"{what}: there is no such program; write an interpreter's path")
    if config.folder and not Path(config.folder).is_dir():
        raise ConfigError(f"environment.folder = {config.folder!r}: there is no such folder; write a folder's path")
    try:
        run_apart(_create(config))
    except WorldEnded as ended:
        raise ConfigError(f"environment.{config.part}: {ended}; {_find_cure(str(ended))}") from None


def run_apart(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new thread and return its result, because the caller may already run an event loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(work)).result()


async def _create(config: ForeignEnvironment) -> None:
    episodes = ForeignEpisodes(config)
    try:
        await episodes.describe()
    finally:
        await episodes.close()


def _find_cure(reason: str) -> str:
    if "_seconds" in reason:
        return "allow more seconds"
    if "'gymnasium'" in reason:
        return 'install it with pip install "rollflow[environments]", or in the environment of environment.interpreter'
    if "ModuleNotFoundError" in reason:
        return "install the module for environment.interpreter, or name the module's folder in environment.folder"
    return "correct the environment or its options"
