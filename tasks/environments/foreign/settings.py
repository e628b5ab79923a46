"""Defines the config values that the worker processes of an environment need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from rollflow.tasks.environments.limits import EpisodeLimits


class WorldSettings(Protocol):
    """The config values for worker processes (see `foreign.config`)."""

    @property
    def interpreter(self) -> str:
        """Path of the interpreter; "" for the interpreter of rollflow."""

    @property
    def spec(self) -> Mapping[str, Any]:
        """The values that a worker process needs to create the environment."""

    @property
    def at_once(self) -> int:
        """Largest number of episodes that run at the same time."""

    @property
    def start_seconds(self) -> float:
        """Seconds allowed for the import of the environment."""

    @property
    def close_seconds(self) -> float:
        """Seconds allowed for closing an environment."""

    @property
    def limits(self) -> EpisodeLimits:
        """The limits of an episode."""
