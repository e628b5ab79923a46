"""What asynchronous rollout is measured against. None of it is in the way of what is used."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

from rollflow.tasks.rollout.admission import Supply
from rollflow.tasks.rollout.scheduler import RolloutScheduler


class BatchScheduler(RolloutScheduler):
    """Batch after batch (`rollout.mode = "batch"`): a wave of groups starts once all before it have ended, and rewards
    are given once the last response of the wave has ended."""

    _generated_all: asyncio.Event

    def _start_groups(self, tasks: asyncio.TaskGroup) -> None:
        if self._running:
            return
        self._generated_all = asyncio.Event()
        super()._start_groups(tasks)

    def _supply(self) -> Supply:
        """Requests may queue at the engines: nothing starts in their place."""
        return replace(super()._supply(), slots=math.inf)

    async def _generated(self, tokens: int) -> None:
        await super()._generated(tokens)
        await self._generated_all.wait()

    def _freed(self, responses: int) -> None:
        super()._freed(responses)
        if self._generating == 0:
            self._generated_all.set()
