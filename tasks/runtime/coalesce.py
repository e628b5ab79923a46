"""Combines concurrent requests: all requests in one iteration of the event loop share one call.

A call to a Ray actor costs about a millisecond, often more than the requested work. `Coalescer` turns concurrent calls
of `ask` into one call with a list of questions. Each answer is delivered as soon as it arrives, without waiting for the
other answers of the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Generic, TypeVar

Question = TypeVar("Question")
Answer = TypeVar("Answer")


class Coalescer(Generic[Question, Answer]):
    """Combines concurrent questions into calls of `send`, which yields lists of (index of the question, answer)."""

    def __init__(self, send: Callable[[Sequence[Question]], AsyncIterator[Sequence[tuple[int, Answer]]]]) -> None:
        self._send = send
        self._waiting: list[tuple[Question, asyncio.Future[Answer]]] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def ask(self, question: Question) -> Answer:
        """Ask one question and return its answer.

        An error of the shared call is raised for each of its questions.
        """
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
            async for packet in self._send([question for question, _ in asked]):
                for place, answer in packet:
                    if not asked[place][1].done():
                        asked[place][1].set_result(answer)
        except Exception as error:  # noqa: BLE001 - the error is raised at every caller that still waits
            for _, future in asked:
                if not future.done():
                    future.set_exception(error)
