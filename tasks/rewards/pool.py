"""The pool of reward workers: every response gets a score, at the latest at its deadline.

A worker that does not answer in time is killed and replaced; its response scores 0 with the reason "deadline".
A worker that dies is replaced, and its response is tried once more. Nothing a verifier does can hang the pool.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollflow.storage.errors import RollflowError
from rollflow.tasks.rewards.verifier import Score
from rollflow.tasks.settings import RewardConfig

START_SECONDS = 120.0  # a worker's first answer may wait for its imports


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One response to judge, by its tokens."""

    tokens: Sequence[int]
    reference: Mapping[str, Any]

    def line(self) -> bytes:
        """The request as the worker reads it."""
        return json.dumps({"tokens": list(self.tokens), "reference": dict(self.reference)}).encode() + b"\n"


class RewardPool:
    """Worker processes and the queue before them. See the module's docstring."""

    def __init__(self, config: RewardConfig, tokenizer_folder: Path) -> None:
        self._config = config
        self._command = [sys.executable, "-m", "rollflow.tasks.rewards.worker", config.kind, config.answer]
        self._command.append(str(tokenizer_folder))
        self._queue: asyncio.Queue[tuple[ScoreRequest, asyncio.Future[Score]]] = asyncio.Queue()
        self._lanes: list[asyncio.Task[None]] = []
        self.scored = 0
        self.timeouts = 0
        self.busy_seconds = 0.0

    async def start(self) -> None:
        """Start the workers."""
        self._lanes = [asyncio.create_task(self._lane()) for _ in range(self._config.workers)]

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Scores in the order of the requests."""
        futures = [asyncio.get_running_loop().create_future() for _ in requests]
        for request, future in zip(requests, futures, strict=True):
            self._queue.put_nowait((request, future))
        return list(await asyncio.gather(*futures))

    async def close(self) -> None:
        """End the workers."""
        for lane in self._lanes:
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)

    async def _lane(self) -> None:
        """One worker after another, each fed until it dies or misses a deadline."""
        worker: _Worker | None = None
        try:
            while True:
                request, future = await self._queue.get()
                for _ in range(2):
                    worker = worker if worker and worker.alive else await _Worker.start(self._command)
                    score = await self._ask(worker, request)
                    if score is not None:
                        break
                if not future.done():
                    future.set_result(score or Score(0.0, "the reward worker died twice on this response"))
        finally:
            if worker:
                await worker.end()

    async def _ask(self, worker: _Worker, request: ScoreRequest) -> Score | None:
        """The worker's score, a deadline's score, or None if the worker died."""
        started = time.monotonic()
        try:
            score = await worker.ask(request, self._config.deadline_seconds)
        except TimeoutError:
            await worker.end()
            self.timeouts += 1
            score = Score(0.0, f"deadline: no verdict in {self._config.deadline_seconds:g} s")
        except WorkerDied:
            return None
        self.scored += 1
        self.busy_seconds += time.monotonic() - started
        return score


class WorkerDied(RollflowError):
    """A reward worker's process ended."""


class _Worker:
    """One process and its pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._answered = False

    @classmethod
    async def start(cls, command: Sequence[str]) -> _Worker:
        """Start a process; it imports while it is not asked yet."""
        pipe = asyncio.subprocess.PIPE
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment)
        return cls(process)

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.returncode is None

    async def ask(self, request: ScoreRequest, deadline: float) -> Score:
        """Its score; `TimeoutError` after `deadline` seconds, `WorkerDied` if it ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        wait = deadline if self._answered else deadline + START_SECONDS
        try:
            self._process.stdin.write(request.line())
            line = await asyncio.wait_for(self._process.stdout.readline(), wait)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise WorkerDied("its pipe broke") from error
        if not line:
            await self._process.wait()
            raise WorkerDied("it ended without an answer")
        self._answered = True
        return Score(*json.loads(line))

    def kill(self) -> None:
        """End it now."""
        if self.alive:
            self._process.kill()

    async def end(self) -> None:
        """End it and see it gone."""
        self.kill()
        await self._process.wait()
