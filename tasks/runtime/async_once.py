"""Computes a value once, when it is first requested; after a failure, the next request computes it again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

Made = TypeVar("Made")


class AsyncOnce(Generic[Made]):
    """Computes a value once for all callers.

    If a caller is cancelled, the computation continues for the other callers.
    """

    def __init__(self, make: Callable[[], Coroutine[Any, Any, Made]]) -> None:
        self._make = make
        self._task: asyncio.Task[Made] | None = None

    async def get(self) -> Made:
        """Wait until the value is computed, and return it; raise the error of a failed computation."""
        if self._task is None or self._has_failed(self._task):
            self._task = asyncio.create_task(self._make())
        return await asyncio.shield(self._task)

    @property
    def found(self) -> Made | None:
        """The value, or None if the value is not computed yet."""
        there = self._task is not None and self._task.done() and not self._has_failed(self._task)
        return self._task.result() if there and self._task is not None else None

    @staticmethod
    def _has_failed(task: asyncio.Task[Made]) -> bool:
        return task.done() and (task.cancelled() or task.exception() is not None)
