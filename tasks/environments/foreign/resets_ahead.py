"""Resets environments for the prompts that are issued next, so that an episode can generate as soon as it starts.

    plan --> task: process --> open --> reset --> ready --open--> episode
                                          `-----> ended: its prompt is not issued next, or its place is needed

- Row and seed of an environment depend only on the prompt, so an episode has the same first state with and without a
  reset ahead.
- A reset ahead takes one of the `at_once` places. It never waits for a place. If no place is free, a starting episode
  gets the place of a reset ahead.
- If a reset ahead fails, the episode that uses it fails in the same way as after a failed reset at its own start.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rollflow.storage.records import Prompt
from rollflow.tasks.environments.foreign.pool import WorldPool
from rollflow.tasks.environments.foreign.world import World


@dataclass(frozen=True, slots=True)
class ReadyWorld:
    """An environment that was reset. Closing `stack` ends its process and frees its place."""

    world: World
    stack: contextlib.AsyncExitStack


@dataclass(eq=False, slots=True)
class AheadReset:
    """A reset ahead for one episode of a prompt. The result of `work` is None if there was no free place."""

    prompt: Prompt
    work: asyncio.Task[ReadyWorld | None] = field(init=False)
    has_place: bool = False


class ResetsAhead:
    """The environments in a pool that are reset for later episodes."""

    def __init__(self, pool: WorldPool, reset: Callable[[World, Prompt], Awaitable[None]]) -> None:
        """Create the object without resets; `reset` creates and resets the environment of a process for a prompt."""
        self.pool, self._reset = pool, reset
        self._waiting: list[AheadReset] = []  # resets that no episode has used, in the order of the expected episodes
        self._endings: set[asyncio.Task[None]] = set()

    def plan(self, prompts: Sequence[Prompt], issued: Sequence[Prompt] = ()) -> None:
        """Begin a reset for one episode of each of these prompts, in this order, while places are free. End the earlier
        resets for other episodes, except those for `issued` prompts, whose episodes start soon.
        """
        kept = {prompt.id for prompt in issued}
        earlier = [one for one in self._waiting if one.prompt.id not in kept]
        self._waiting = [one for one in self._waiting if one.prompt.id in kept]
        for prompt in prompts:
            if (found := _find_reset(earlier, prompt)) is not None:
                earlier.remove(found)
                self._waiting.append(found)
            elif not self.pool.is_full:
                self._waiting.append(one := AheadReset(prompt))
                one.work = asyncio.create_task(self._run_reset(one), name="reset ahead")
        for one in earlier:
            self._end_later(one)

    @contextlib.asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncIterator[World]:
        """Provide the environment that was reset for a prompt, or else a new process; end the process after the block.

        Raises:
            WorldEnded: the reset failed, or no process can be started.
            ConfigError: the environment counts as broken, because too many episodes in a row failed.
        """
        if (ready := await self._take(prompt)) is not None:
            async with ready.stack:
                yield ready.world
            return
        # While this episode waits, the pool is full for resets, so no reset takes the place that becomes free.
        if self.pool.is_full and (placed := [one for one in self._waiting if one.has_place]):
            self._waiting.remove(placed[-1])
            self._end_later(placed[-1])
        async with self.pool.open() as world:
            yield world

    async def close(self) -> None:
        """End all resets that no episode has used."""
        self.plan(())
        while self._endings:
            await asyncio.wait(self._endings)

    async def _take(self, prompt: Prompt) -> ReadyWorld | None:
        """Wait for the end of a reset for this prompt, and return its environment; None if there is no such reset."""
        if (found := _find_reset(self._waiting, prompt)) is None:
            return None
        self._waiting.remove(found)
        try:
            await asyncio.wait([found.work])
        except asyncio.CancelledError:
            self._end_later(found)
            raise
        return found.work.result()

    async def _run_reset(self, one: AheadReset) -> ReadyWorld | None:
        if self.pool.is_full:  # other resets or episodes have taken the places since the plan
            if one in self._waiting:
                self._waiting.remove(one)
            return None
        one.has_place = True
        try:
            async with contextlib.AsyncExitStack() as stack:
                world = await stack.enter_async_context(self.pool.open())
                await self._reset(world, one.prompt)
                return ReadyWorld(world, stack.pop_all())
        except BaseException:
            one.has_place = False
            raise

    def _end_later(self, one: AheadReset) -> None:
        ending = asyncio.create_task(_end_reset(one), name="end of a reset ahead")
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)


def _find_reset(resets: Sequence[AheadReset], prompt: Prompt) -> AheadReset | None:
    return next((one for one in resets if one.prompt.id == prompt.id), None)


async def _end_reset(one: AheadReset) -> None:
    one.work.cancel()
    await asyncio.wait([one.work])
    if not one.work.cancelled() and one.work.exception() is None and (ready := one.work.result()) is not None:
        await ready.stack.aclose()
