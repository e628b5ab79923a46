"""Runs the actor of an engine in the test's own process, on the virtual clock, with calls that take time."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

from rollflow.tasks.actors.engine import EngineActor
from rollflow.tasks.engines.base import Engine, WeightsSource


class NearEngineActor(EngineActor):
    """An `EngineActor` without threads, around a started engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(lambda: engine)
        self._built = engine

    async def fetch(self, version: int, source: WeightsSource) -> None:
        """Return a path that the timed engine ignores."""

    async def update(self, owner: str, version: int, source: WeightsSource) -> None:
        self._check_owner(owner)
        await self._engine.update(version, Path())


class Near:
    """A replacement for Ray's actor handle. Arguments and results are pickled.

    Calls begin in order, each after the next delay of `delays`. Answers arrive after the same delay."""

    def __init__(self, actor: object, delays: Sequence[float] = (0.0,)) -> None:
        self._actor, self._delays = actor, itertools.cycle(delays)
        self._begun: asyncio.Future[None] | None = None  # the newest call
        self.asked: list[str] = []  # names of the called methods

    def __getattr__(self, method: str) -> _Method:
        return _Method(self, method)

    def ask(self, method: str, arguments: tuple[Any, ...]) -> Awaitable[Any]:
        """Call a method; it runs even if its caller stops waiting."""
        self.asked.append(method)
        former, self._begun = self._begun, asyncio.get_running_loop().create_future()
        call = self._call(former, self._begun, method, pickle.dumps(arguments))
        return asyncio.shield(asyncio.ensure_future(call))

    async def _call(
        self, former: asyncio.Future[None] | None, begun: asyncio.Future[None], method: str, sent: bytes
    ) -> Any:
        await asyncio.sleep(next(self._delays))
        if former is not None:
            await former
        begun.set_result(None)
        answer = await getattr(self._actor, method)(*pickle.loads(sent))  # noqa: S301  made right here
        await asyncio.sleep(next(self._delays))
        return pickle.loads(pickle.dumps(answer))  # noqa: S301


class _Method:
    """One method of the handle."""

    def __init__(self, actor: Near, method: str) -> None:
        self._actor, self._method = actor, method

    def remote(self, *arguments: Any) -> Awaitable[Any]:
        return self._actor.ask(self._method, arguments)
