"""Starts a scorer's worker process, sends requests as lines, and reads scores as lines."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from rollflow.storage.errors import RollflowError
from rollflow.tasks.runtime.actor_warnings import open_socket
from rollflow.tasks.sandboxes.figures import CounterBoard, figures_of_process
from rollflow.tasks.scorers.base import Score
from rollflow.tasks.scorers.code.deadlines import DeadlineReport

T = TypeVar("T")
READY = "ready"
LONGEST_LINE = 1 << 24  # largest size of a score in bytes; each token of the response may have a value of 8 bytes


class WorkerDied(RollflowError):
    """Raised if a scorer's worker process has ended."""


class NotReady(RollflowError):
    """Raised if a scorer's worker process does not become ready to score responses."""


class WorkerProcess:
    """A scorer's worker process and the pipes to it."""

    def __init__(self, process: asyncio.subprocess.Process, figures: CounterBoard) -> None:
        """Use a started process; `figures` are the counters of its sandboxes."""
        self._process, self._figures = process, figures
        self._is_ready = False
        self.version = ""  # the version of the scorer, known once the worker process is ready

    @classmethod
    async def start(cls, command: Sequence[str]) -> WorkerProcess:
        """Start a worker process."""
        pipe = asyncio.subprocess.PIPE
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with figures_of_process().open_child() as (figures, fd):
            process = await asyncio.create_subprocess_exec(
                *command,
                str(fd),
                stdin=pipe,
                stdout=pipe,
                env=environment,
                pass_fds=(open_socket().fileno(), fd),
                limit=LONGEST_LINE,
            )
        return cls(process, figures)

    @property
    def alive(self) -> bool:
        """True if the process runs."""
        return self._process.returncode is None

    async def wait_ready(self, seconds: float) -> None:
        """Wait until the worker process has finished its imports; raise `NotReady` if the process fails or takes over
        `seconds`.
        """
        if self._is_ready:
            return
        try:
            line = await self._read_line(seconds)
        except TimeoutError:
            await self.end()
            raise NotReady(
                f"the scorer's worker process did not start within reward.start_seconds = {seconds:g}; set more seconds"
            ) from None
        except WorkerDied:
            raise NotReady(f"the scorer's worker process ended with exit code {self._process.returncode}") from None
        word, _, version = line.decode(errors="replace").strip().partition(" ")
        if word != READY:  # the line says why the worker process is not ready
            await self.end()
            raise NotReady(f"{word} {version}".strip())
        self._is_ready, self.version = True, version

    def send(self, lines: Sequence[bytes]) -> None:
        """Send requests, one per line, to the worker process."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"".join(lines))

    async def read_score(self, seconds: float) -> Score:
        """Read the next score from the worker process; raise `TimeoutError` after `seconds`, or `WorkerDied` if the
        process has ended.
        """
        return await self._decode(await self._read_line(seconds), self._build_score)

    async def read_numbered_score(self) -> tuple[int, Score | None, DeadlineReport | None]:
        """Read the next score with the number of its request, or a `DeadlineReport`, or both; raise `WorkerDied` if the
        process has ended.
        """
        return await self._decode(await self._read_line(None), self._read_answer)

    def _build_score(self, columns: Sequence[Any]) -> Score:
        return replace(Score.of_columns(columns), version=self.version)

    def _read_answer(self, found: Sequence[Any]) -> tuple[int, Score | None, DeadlineReport | None]:
        score = None if found[1] is None else self._build_score(found[1])
        return int(found[0]), score, DeadlineReport.of_columns(found[2]) if len(found) > 2 else None

    async def _decode(self, line: bytes, build: Callable[[Any], T]) -> T:
        """Build a value from a line of JSON; end the worker process and raise `WorkerDied` if the line is invalid."""
        try:
            return build(json.loads(line))
        except (ValueError, TypeError, KeyError, IndexError):
            await self.end()
            raise WorkerDied("the scorer's worker process wrote no valid score") from None

    async def discard_scores(self, count: int, deadline: float) -> None:
        """Discard the scores of `count` requests that another process scores now; end this process if a score takes
        over `deadline` seconds.
        """
        try:
            for _ in range(count if self.alive else 0):
                await self._read_line(deadline)
        except (TimeoutError, WorkerDied):
            await self.end()

    async def _read_line(self, seconds: float | None) -> bytes:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                line = await self._process.stdout.readline()
        except ValueError:  # raised if the line is longer than any valid score
            await self.end()
            raise WorkerDied("the scorer's worker process wrote no valid score") from None
        if not line:
            await self._wait()
            raise WorkerDied("the scorer's worker process ended without an answer")
        return line

    def kill(self) -> None:
        """Kill the worker process, so that reading its output raises `WorkerDied`."""
        if self.alive:
            self._process.kill()

    async def end(self) -> None:
        """Kill the worker process and wait until it has ended."""
        self.kill()
        await self._wait()

    async def _wait(self) -> None:
        """Wait until the process has ended, and store the counters of its sandboxes."""
        await self._process.wait()
        figures_of_process().close_child(self._figures)
