"""Reads a run's new policy versions from its log, for the rollout actor."""

from __future__ import annotations

import asyncio
import contextlib

from rollflow.storage.errors import Unreachable
from rollflow.tasks.actors.channel import RayChannel
from rollflow.tasks.rollout.proxy import WeightsProbe
from rollflow.tasks.run.context import RunContext

NEWS_SECONDS = 2.0  # longest wait for the channel to announce a version


class StoreFeed:
    """Implements `VersionFeed` with the run's log; the channel only signals when to read the log."""

    def __init__(self, context: RunContext, channel: RayChannel) -> None:
        self._context, self._channel = context, channel
        self._policies = context.policies
        self._tokens = context.probe_tokens
        self.newest = -1  # newest published version when the log was last read

    def ask(self) -> int:
        """Read the log and return the newest published version."""
        self.newest = self._policies.newest()
        return self.newest

    async def newer(self, version: int) -> int:
        """Wait for a version above `version`; implements `VersionFeed.newer`."""
        while True:
            with contextlib.suppress(Unreachable):  # the channel may be restarting
                await self._channel.wait_version(version, NEWS_SECONDS)
            newest = await asyncio.to_thread(self.ask)
            if newest > version:
                return newest

    async def fetch_kept(self, version: int) -> tuple[RunContext, WeightsProbe]:
        """Return what `fetch` returns, or raise `Missing` if the version's weights were pruned."""
        found = await asyncio.to_thread(self._policies.find, version)
        await asyncio.to_thread(self._policies.check_kept, found)
        return await self.fetch(version)

    async def fetch(self, version: int) -> tuple[RunContext, WeightsProbe]:
        """Return the run's context, from which engines fetch the weights, and the version's probe."""
        found = await asyncio.to_thread(self._policies.find, version)
        return self._context, WeightsProbe(self._tokens, found.probe, self._context.config.probe_tolerance)
