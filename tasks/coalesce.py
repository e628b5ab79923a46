"""Many small awaits, few large calls: what is asked in one tick of the event loop travels together.

A call to an actor costs about a millisecond however little it carries; on a small machine that is more than
the work. `Coalescer` turns concurrent `ask` calls into one call with a list.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Question = TypeVar("Question")
Answer = TypeVar("Answer")


class Coalescer(Generic[Question, Answer]):
    """Batches concurrent questions into calls of `send`, which answers a list in its order."""

    def __init__(self, send: Callable[[Sequence[Question]], Awaitable[Sequence[Answer]]]) -> None:
        self._send = send
        self._waiting: list[tuple[Question, asyncio.Future[Answer]]] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def ask(self, question: Question) -> Answer:
        """The answer to one question; raises what the call that carried it raised."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append((question, future))
        return await future

    def _flush(self) -> None:
        task = asyncio.get_running_loop().create_task(self._call(self._waiting))
        self._waiting = []
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _call(self, asked: list[tuple[Question, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._send([question for question, _ in asked])
        except Exception as error:  # noqa: BLE001 - handed to everyone who asked
            for _, future in asked:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), answer in zip(asked, answers, strict=True):
            if not future.done():
                future.set_result(answer)
