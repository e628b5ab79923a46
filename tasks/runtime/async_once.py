"""A value that is made once, by the first who asks for it; where that failed, by the next who asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

Made = TypeVar("Made")


class Once(Generic[Made]):
    """In one event loop. Who stops waiting stops nobody else."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, Made]]) -> None:
        self._make = make
        self._task: asyncio.Task[Made] | None = None

    async def get(self) -> Made:
        """The value, waited for; raises what making it did."""
        if self._task is None or self._failed(self._task):
            self._task = asyncio.create_task(self._make())
        return await asyncio.shield(self._task)

    @property
    def found(self) -> Made | None:
        """The value, if it is there by now."""
        there = self._task is not None and self._task.done() and not self._failed(self._task)
        return self._task.result() if there and self._task is not None else None

    @staticmethod
    def _failed(task: asyncio.Task[Made]) -> bool:
        return task.done() and (task.cancelled() or task.exception() is not None)
