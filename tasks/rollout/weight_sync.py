"""Weight sync: loads the newest policy version into the inference engines.

    newest version published --> fetch weights --> suspend, update, resume, probe --> admit more --> wait

Weight sync always loads the newest version, and skips versions that were replaced meanwhile. An evaluation never delays
weight sync, because each evaluation has an engine for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rollflow.tasks.engines.base import InFlight
from rollflow.tasks.rollout.proxy import InferenceProxy, WeightsProbe


class VersionFeed(Protocol):
    """Reports new policy versions and loads their weights."""

    async def newer(self, version: int) -> int:
        """Wait for a policy version above `version`; return the newest published policy version."""

    async def fetch(self, version: int) -> tuple[Any, WeightsProbe]:
        """Load the weights of a policy version, and the learner's log-probabilities that verify the weights."""


@dataclass(frozen=True, slots=True)
class VersionCallbacks:
    """Callbacks of the weight sync, for published policy versions and for versions that the engines have loaded."""

    published: Callable[[int], None]
    updated: Callable[[int], None]


class WeightSync:
    """Keeps the inference engines at the newest policy version."""

    def __init__(self, proxy: InferenceProxy, feed: VersionFeed, in_flight: InFlight, hooks: VersionCallbacks) -> None:
        self._proxy, self._feed, self._in_flight, self._hooks = proxy, feed, in_flight, hooks

    async def run(self, last: int) -> None:
        """Update the engines to each new policy version until they have version `last`."""
        version = self._proxy.version
        while version < last:
            version = await self._feed.newer(version)
            self._hooks.published(version)
            weights, probe = await self._feed.fetch(version)
            await self._proxy.update(version, weights, probe, self._in_flight)
            self._hooks.updated(version)
