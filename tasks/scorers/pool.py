"""The pool for verifiers that score one response after another: every response gets a score, at the latest at its
deadline.

A worker that does not answer in time is killed and replaced; its response scores 0 with the outcome "timeout". A worker
that dies is replaced, and its response is tried once more. No verifier can block the pool.

    queue --up to AHEAD_SECONDS of work--> worker --scores, in order--> their callers
      ^                                        |
      +---- responses behind a slow one <------+   and another worker takes over until the slow score is there

So a slow score delays other responses by at most `SLOW_SECONDS`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from pathlib import Path

from rollflow.tasks.scorers.base import Score, timeout_score
from rollflow.tasks.scorers.config import RewardConfig
from rollflow.tasks.scorers.worker_pool import DIED_TWICE, ScoringJob, WorkerPool
from rollflow.tasks.scorers.worker_process import WorkerDied, WorkerProcess

CHUNK = 32  # most responses sent to a worker at once; sending each response on its own would cost too much
AHEAD_SECONDS = 0.1  # most seconds of work sent at once, because responses behind a slow response are scored twice
SLOW_SECONDS = 1.0  # a score that takes longer delays no other response


class RewardPool(WorkerPool):
    """The worker processes and their queue. See the module's docstring.

    Each lane runs one worker process at a time. The pool has twice as many lanes as `workers`, and as many turns as
    `workers`. A lane takes responses only while it has a turn, and passes the turn to another lane while its own worker
    is slow. More processes than `workers` are started only if a worker is slow.
    """

    def __init__(self, config: RewardConfig, tokenizer_folder: Path) -> None:
        super().__init__(config, tokenizer_folder)
        self._turns = asyncio.Semaphore(config.workers)
        self._quick = min(SLOW_SECONDS, config.deadline_seconds)
        self._pace = SLOW_SECONDS  # seconds per score of recent responses

    def _start_lanes(self) -> list[asyncio.Task[None]]:
        count = self._config.workers
        return [asyncio.create_task(self._run_lane(first=number < count)) for number in range(2 * count)]

    async def _take(self) -> deque[ScoringJob]:
        """Take the next few responses from the queue; only one response if recent scores were slow."""
        jobs = deque([(await self._queue.get())[1]])
        while not self._queue.empty() and len(jobs) < CHUNK and len(jobs) * self._pace < AHEAD_SECONDS:
            jobs.append(self._queue.get_nowait()[1])
        return jobs

    async def _run_lane(self, *, first: bool) -> None:
        """Run one worker after another, each until it dies or misses a deadline.

        A lane with `first` starts its worker before there is a response, so that the first response does not wait for
        the worker's imports.
        """
        worker: WorkerProcess | None = None
        has_turn = False
        try:
            while True:
                if not has_turn:
                    await self._turns.acquire()
                has_turn = True
                jobs = deque[ScoringJob]() if first and worker is None else await self._take()
                worker = await self._ensure_worker(worker)
                if worker is None or not await self._wait_ready(worker):
                    worker = None
                    await self._pause_start(jobs)
                    continue
                if not jobs:
                    continue
                handed_over = await self._serve(worker, jobs)
                has_turn = handed_over is None
                if handed_over:
                    await worker.discard_scores(handed_over, self._config.deadline_seconds)
        finally:
            if worker:
                await worker.end()

    async def _serve(self, worker: WorkerProcess, jobs: deque[ScoringJob]) -> int | None:
        """Send the jobs in one write and read their scores one by one; requeue the jobs without a score at the end.

        If a job is slow, the jobs behind the slow job are requeued immediately, and the turn is passed to another lane.
        Return the number of the requeued jobs in this case, otherwise None.
        """
        started, handed_over = time.monotonic(), None
        try:
            worker.send([job.body + b"\n" for job in jobs])
            while jobs:
                try:
                    score = await worker.read_score(self._quick)
                except TimeoutError:
                    handed_over = self._pass_on(jobs)
                    score = await worker.read_score(self._config.deadline_seconds - self._quick)
                self._settle(jobs.popleft(), score)
        except TimeoutError:
            await worker.end()
            self._settle(jobs.popleft(), timeout_score(self._config.deadline_seconds))
        except WorkerDied:
            jobs[0].deaths += 1
            if jobs[0].deaths == 2:
                self._settle(jobs.popleft(), DIED_TWICE)
        self._put(*jobs)
        self.usage.busy_seconds += time.monotonic() - started
        return handed_over

    def _pass_on(self, jobs: deque[ScoringJob]) -> int:
        """Leave only the first job with the worker; requeue the other jobs and return their number."""
        others = [jobs.pop() for _ in range(len(jobs) - 1)]
        self._put(*others)
        self._turns.release()
        return len(others)

    def _settle(self, job: ScoringJob, score: Score) -> None:
        self._pace += (score.seconds - self._pace) / 2
        super()._settle(job, score)
