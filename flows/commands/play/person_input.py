"""Reads the lines that a person types, while an event loop runs in another thread. Lines are read in the main thread,
where Ctrl-C arrives and the terminal's line editing works; the event loop's tasks continue while a person thinks.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any

CLOSE_SECONDS = 20.0  # longest time in seconds until the event loop has ended after Ctrl-C


class PersonInput:
    """Runs a coroutine in a thread, and reads lines for the coroutine in the thread that calls `run`."""

    def __init__(self, read: Callable[[str], str] = input) -> None:
        """Read each line with `read`."""
        self._read = read
        self._asked: queue.SimpleQueue[tuple[str, asyncio.AbstractEventLoop, asyncio.Future[str]] | None]
        self._asked = queue.SimpleQueue()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives `input` editing keys and a history

    async def read_line(self, marks: str) -> str:
        """Show the text `marks`, and return the next line that the person types.

        Raises:
            EOFError: the person has ended the input with Ctrl-D, or the input has ended.
        """
        loop = asyncio.get_running_loop()
        line: asyncio.Future[str] = loop.create_future()
        self._asked.put((marks, loop, line))
        return await line

    def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run the coroutine until it ends, and raise its error.

        Raises:
            KeyboardInterrupt: the person has pressed Ctrl-C; the coroutine was cancelled.
        """
        thread = threading.Thread(target=self._run_loop, args=(work,), name="play", daemon=True)
        thread.start()
        try:
            while (asked := self._asked.get()) is not None:
                self._answer(*asked)
        except KeyboardInterrupt:
            self._cancel()
            thread.join(CLOSE_SECONDS)
            raise
        thread.join()
        if self._error is not None:
            raise self._error

    def _run_loop(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def follow() -> None:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            await work()

        try:
            asyncio.run(follow())
        except BaseException as error:  # noqa: BLE001 - the other thread raises it
            self._error = error
        finally:
            self._asked.put(None)

    def _answer(self, marks: str, loop: asyncio.AbstractEventLoop, line: asyncio.Future[str]) -> None:
        try:
            text = self._read(marks)
        except EOFError as error:
            loop.call_soon_threadsafe(_set_error, line, error)
            return
        # A terminal may send bytes that are not UTF-8, which no tokenizer can encode.
        text = text.encode("utf-8", "replace").decode()
        loop.call_soon_threadsafe(_set_line, line, text)

    def _cancel(self) -> None:
        if self._loop is not None and self._task is not None:
            with contextlib.suppress(RuntimeError):  # The event loop has already ended.
                self._loop.call_soon_threadsafe(self._task.cancel)


def _set_line(line: asyncio.Future[str], text: str) -> None:
    if not line.done():
        line.set_result(text)


def _set_error(line: asyncio.Future[str], error: EOFError) -> None:
    if not line.done():
        line.set_exception(error)
