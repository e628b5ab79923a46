"""A pool of worker processes for verifiers that score one response per call.

A worker process that misses a deadline is killed and replaced, and the response gets the outcome "timeout". If a worker
process dies, the response that it was scoring is tried once more.

    queue --up to AHEAD_SECONDS of work--> worker --scores, in order--> their callers
      ^                                        |
      +---- responses behind a slow one <------+   and another worker takes over until the slow score is there

A slow score delays other responses by at most `SLOW_SECONDS`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from pathlib import Path

from rollflow.tasks.scorers.base import Score
from rollflow.tasks.scorers.config import RewardConfig
from rollflow.tasks.scorers.worker_pool import ScoringJob, WorkerPool
from rollflow.tasks.scorers.worker_process import WorkerDied, WorkerProcess

CHUNK = 32  # largest number of responses sent to a worker process at once
AHEAD_SECONDS = 0.1  # largest estimated scoring time, in seconds, of the responses sent to a worker process at once
SLOW_SECONDS = 1.0  # seconds after which responses behind a slow response go to another worker process


class RewardPool(WorkerPool):
    """A pool of worker processes that score one response after another.

    A lane is an asyncio task that runs one worker process at a time. The pool has `2 * workers` lanes, of which at most
    `workers` may take responses at the same time. More than `workers` processes run only if one of them is slow.
    """

    def __init__(self, config: RewardConfig, tokenizer_folder: Path, section: str = "reward") -> None:
        super().__init__(config, tokenizer_folder, section)
        self._turns = asyncio.Semaphore(config.workers)
        self._quick = min(SLOW_SECONDS, config.deadline_seconds)
        self._pace = SLOW_SECONDS  # moving average of the seconds for scoring one response

    def _start_lanes(self) -> list[asyncio.Task[None]]:
        count = self._config.workers
        return [asyncio.create_task(self._run_lane(first=number < count)) for number in range(2 * count)]

    async def _take(self) -> deque[ScoringJob]:
        """Remove responses from the queue, as many as a worker process can probably score within `AHEAD_SECONDS`."""
        jobs = deque([(await self._queue.get())[1]])
        while not self._queue.empty() and len(jobs) < CHUNK and len(jobs) * self._pace < AHEAD_SECONDS:
            jobs.append(self._queue.get_nowait()[1])
        return jobs

    async def _run_lane(self, *, first: bool) -> None:
        """Run one worker process after another, each until it dies or misses a deadline.

        With `first`, a worker process starts before the first response, so that the response does not wait for
        imports.
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
        """Send jobs to a worker process, read their scores one by one, and queue the jobs without a score again.

        If a job is slow, the jobs behind it are queued again at once, and another lane scores them. The result is the
        number of jobs behind a slow job, or None if no job was slow.
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
            self._settle_late(jobs.popleft())
        except WorkerDied:
            jobs[0].deaths += 1
            if jobs[0].deaths == 2:
                self._settle_dead(jobs.popleft())
        self._put(*jobs)
        self.usage.busy_seconds += time.monotonic() - started
        return handed_over

    def _pass_on(self, jobs: deque[ScoringJob]) -> int:
        """Queue all jobs except the first one again, let another lane take responses, and return the number of queued
        jobs.
        """
        others = [jobs.pop() for _ in range(len(jobs) - 1)]
        self._put(*others)
        self._turns.release()
        return len(others)

    def _settle(self, job: ScoringJob, score: Score) -> None:
        self._pace += (score.seconds - self._pace) / 2
        super()._settle(job, score)
