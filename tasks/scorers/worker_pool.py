"""The base class of pools of worker processes, with a queue of responses.

A lane is an asyncio task that runs one worker process at a time. If a worker process dies before it is ready, this does
not count as a failed try of a response. The pool fails after `START_TRIES * workers` consecutive worker processes died
before they were ready.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Outcome
from rollflow.tasks.runtime.actor_warnings import open_socket
from rollflow.tasks.scorers.base import Score, Scorer, ScoreRequest, ScorerUsage, failure_score, timeout_score
from rollflow.tasks.scorers.config import ImportReward, RewardConfig
from rollflow.tasks.scorers.worker_process import NotReady, WorkerProcess

START_TRIES = 5
AGAIN_SECONDS = 0.5  # seconds before the next try to start a worker process
DIED_TWICE = "the reward worker died twice on this response"


@dataclass(eq=False, slots=True)
class ScoringJob:
    """A scoring request that waits in the queue or runs in a worker process."""

    arrival: int
    body: bytes  # the request as JSON
    future: asyncio.Future[Score]
    deaths: int = 0  # number of worker processes that died on this response
    alone: bool = False  # True if the response must be scored alone
    # name of the data row with measured program times; "" if the deadlines are fixed
    row: str = ""
    timer: asyncio.TimerHandle | None = None


class WorkerPool(Scorer):
    """A pool of worker processes with one queue of responses. A subclass defines how a lane uses its worker process."""

    def __init__(self, config: RewardConfig, tokenizer_folder: Path, section: str = "reward") -> None:
        self._config, self._section = config, section
        self.slots = config.workers
        self._command = [sys.executable, "-m", "rollflow.tasks.scorers.worker"]
        self._command += [config.model_dump_json(), str(tokenizer_folder), str(open_socket().fileno())]
        self._queue: asyncio.PriorityQueue[tuple[int, ScoringJob]] = asyncio.PriorityQueue()  # sorted by arrival
        self._arrivals = itertools.count()
        self._lanes: list[asyncio.Task[None]] = []
        self._unready, self._tries = 0, START_TRIES * config.workers  # consecutive failed starts, and their limit
        self._hopeless = asyncio.Event()
        self._error = ConfigError("no worker process of the scorer has been started yet")
        self._version = ""  # the scorer's version in the newest worker process
        self.usage = ScorerUsage()

    async def start(self) -> None:
        """Start the worker processes."""
        self._lanes = self._start_lanes()

    def _start_lanes(self) -> list[asyncio.Task[None]]:
        raise NotImplementedError

    def submit(self, requests: Sequence[ScoreRequest]) -> list[asyncio.Future[Score]]:
        """Queue requests and return a future of each score, in the order of the requests."""
        futures: list[asyncio.Future[Score]] = [asyncio.get_running_loop().create_future() for _ in requests]
        for request, future in zip(requests, futures, strict=True):
            try:
                job = ScoringJob(next(self._arrivals), request.encode(), future, row=self._name_row(request))
                self._put(job)
            except (TypeError, ValueError) as error:  # raised if a user-defined environment passed an invalid request
                future.set_result(failure_score("request", error))
        return futures

    def _name_row(self, request: ScoreRequest) -> str:
        """Return the name of the data row with measured program times, or "" if the deadlines are fixed."""
        return ""

    async def serve(self, finished: asyncio.Event) -> None:
        """Wait until `finished` is set, then end the worker processes; raise `ConfigError` if no worker process becomes
        ready.
        """
        ends = [asyncio.create_task(event.wait()) for event in (finished, self._hopeless)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        if not finished.is_set():
            raise self._error
        await self.close()

    async def close(self) -> None:
        """End the worker processes."""
        for lane in self._lanes:
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)

    def _put(self, *jobs: ScoringJob) -> None:
        for job in jobs:
            self._queue.put_nowait((job.arrival, job))

    async def _ensure_worker(self, worker: WorkerProcess | None) -> WorkerProcess | None:
        """Return the worker process if it is alive, or a new one; return None if no process can be started."""
        try:
            return worker if worker and worker.alive else await WorkerProcess.start(self._command)
        except OSError:
            return None

    async def _wait_ready(self, worker: WorkerProcess) -> bool:
        """Wait until the worker process has finished its imports; return False if it does not become ready."""
        try:
            await worker.wait_ready(self._config.start_seconds)
        except NotReady as error:
            self._unready += 1
            config = self._config
            key = f"path = {config.path!r}" if isinstance(config, ImportReward) else f"kind = {config.kind!r}"
            tries = f"{self._tries} workers in a row did not get ready; the last one: {error}"
            self._error = ConfigError(f"{self._section}.{key}: {tries}")
            return False
        self._unready, self._version = 0, worker.version
        return True

    async def _pause_start(self, jobs: Sequence[ScoringJob]) -> None:
        """Put the jobs of a worker process that did not become ready back into the queue, and pause; fail the pool
        after too many tries.
        """
        self._put(*jobs)
        if self._unready >= self._tries:
            self._give_up()
        await asyncio.sleep(AGAIN_SECONDS)

    def _give_up(self) -> None:
        """Fail the pool and all requests in its queue."""
        self._hopeless.set()
        while not self._queue.empty():
            _, job = self._queue.get_nowait()
            if not job.future.done():
                job.future.set_exception(self._error)

    def _settle_late(self, job: ScoringJob) -> None:
        """Score a response that missed its deadline."""
        self._settle(job, timeout_score(self._config.deadline_seconds, self._config.unread_value))

    def _settle_dead(self, job: ScoringJob) -> None:
        """Score a response on which two worker processes died."""
        self._settle(job, Score(self._config.unread_value, DIED_TWICE, Outcome.KILLED, failed=True))

    def _settle(self, job: ScoringJob, score: Score) -> None:
        self.usage.scored += 1
        self.usage.timeouts += score.outcome is Outcome.TIMEOUT
        if not job.future.done():
            job.future.set_result(score if score.version else replace(score, version=self._version))
