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
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollflow.storage.errors import RollflowError
from rollflow.tasks.rewards.verifier import Score
from rollflow.tasks.settings import RewardConfig

CHUNK = 32  # responses handed to a worker at a time: a write and a wake-up each would cost more than the verdict
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
        self._queue: asyncio.Queue[_Job] = asyncio.Queue()
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
            self._queue.put_nowait(_Job(request, future))
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
                jobs = deque([await self._queue.get()])
                while not self._queue.empty() and len(jobs) < CHUNK:
                    jobs.append(self._queue.get_nowait())
                while jobs:
                    worker = worker if worker and worker.alive else await _Worker.start(self._command)
                    await self._serve(worker, jobs)
        finally:
            if worker:
                await worker.end()

    async def _serve(self, worker: _Worker, jobs: deque[_Job]) -> None:
        """Send the jobs in one write, take verdicts one by one; returns when all are done or the worker is not."""
        started = time.monotonic()
        try:
            worker.send([job.request for job in jobs])
            while jobs:
                jobs[0].settle(await worker.verdict(self._config.deadline_seconds))
                jobs.popleft()
                self.scored += 1
        except TimeoutError:
            await worker.end()
            self.timeouts += 1
            jobs.popleft().settle(Score(0.0, f"deadline: no verdict in {self._config.deadline_seconds:g} s"))
        except WorkerDied:
            jobs[0].deaths += 1
            if jobs[0].deaths == 2:
                jobs.popleft().settle(Score(0.0, "the reward worker died twice on this response"))
        self.busy_seconds += time.monotonic() - started


@dataclass(slots=True)
class _Job:
    """A request on its way to its score."""

    request: ScoreRequest
    future: asyncio.Future[Score]
    deaths: int = 0

    def settle(self, score: Score) -> None:
        if not self.future.done():
            self.future.set_result(score)


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

    def send(self, requests: Sequence[ScoreRequest]) -> None:
        """Hand over requests; their verdicts come in order."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"".join(request.line() for request in requests))

    async def verdict(self, deadline: float) -> Score:
        """The next verdict; `TimeoutError` after `deadline` seconds, `WorkerDied` if the process ended."""
        assert self._process.stdout is not None
        async with asyncio.timeout(deadline if self._answered else deadline + START_SECONDS):
            line = await self._process.stdout.readline()
        if not line:
            await self._process.wait()
            raise WorkerDied("it ended without an answer")
        self._answered = True
        return Score(*json.loads(line))

    async def end(self) -> None:
        """End it and see it gone."""
        if self.alive:
            self._process.kill()
        await self._process.wait()
