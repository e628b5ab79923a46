"""Reads a run's new policy versions from the run's log, for the rollout actor."""

from __future__ import annotations

import asyncio
import contextlib

from rollflow.storage.errors import Unreachable
from rollflow.tasks.actors.channel import RayChannel
from rollflow.tasks.rollout.proxy import WeightsProbe
from rollflow.tasks.run.context import RunContext

NEWS_SECONDS = 2.0  # longest time, in seconds, to wait for the channel to announce a policy version


class StoreFeed:
    """Finds new policy versions in the run's log; implements `VersionFeed`.

    The channel only signals when to read the log.
    """

    def __init__(self, context: RunContext, channel: RayChannel) -> None:
        self._context, self._channel = context, channel
        self._policies = context.policies
        self._tokens = context.probe_tokens
        self.newest = -1  # newest published policy version when the run's log was last read

    def ask(self) -> int:
        """Read the run's log and return the newest published policy version."""
        self.newest = self._policies.newest()
        return self.newest

    async def newer(self, version: int) -> int:
        """Wait until a policy version newer than `version` is published, and return the newest policy version."""
        while True:
            with contextlib.suppress(Unreachable):  # the channel's actor may be restarting
                await self._channel.wait_version(version, NEWS_SECONDS)
            newest = await asyncio.to_thread(self.ask)
            if newest > version:
                return newest

    async def fetch_kept(self, version: int) -> tuple[RunContext, WeightsProbe]:
        """Return what `fetch` returns, or raise `Missing` if the weights of the policy version were deleted."""
        found = await asyncio.to_thread(self._policies.find, version)
        await asyncio.to_thread(self._policies.check_kept, found)
        return await self.fetch(version)

    async def fetch(self, version: int) -> tuple[RunContext, WeightsProbe]:
        """Return the run's context, from which engines fetch weights, and the log-probs that verify the weights."""
        found = await asyncio.to_thread(self._policies.find, version)
        return self._context, WeightsProbe(self._tokens, found.probe, self._context.config.probe_tolerance)
