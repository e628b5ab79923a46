"""A pool of worker processes for verifiers that are asynchronous or score several responses in one call.

    queue --up to `at_once` responses--> worker --numbered scores, in any order--> their callers
      ^                                    |
      +---- each alone, if it was one <----+   the worker died, or did not answer in time
            of several

- An asynchronous verifier gets new responses while others are still being scored. Any other verifier gets new responses
  only after all previous responses have scores.
- If a worker dies or hangs, each of its running responses is scored again alone, because any of them may be the cause.
- A response that again ends its worker process gets the outcome "killed". A response that misses its deadline while it
  is scored alone gets the outcome "timeout".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rollflow.storage.run_records.case_anchors import CaseAnchors
from rollflow.tasks.scorers.base import ScoreRequest
from rollflow.tasks.scorers.code.deadlines import DeadlineReport, name_row
from rollflow.tasks.scorers.config import CodeReward, CompositeReward, ImportReward
from rollflow.tasks.scorers.verifier import Verifier
from rollflow.tasks.scorers.worker_pool import ScoringJob, WorkerPool
from rollflow.tasks.scorers.worker_process import WorkerDied, WorkerProcess

# seconds that a worker process gets after the deadline to end the call itself; then the process is killed
GRACE_SECONDS = 5.0


class ConcurrentPool(WorkerPool):
    """A pool of worker processes, each of which scores several responses at a time."""

    def __init__(
        self,
        config: ImportReward | CodeReward | CompositeReward,
        tokenizer_folder: Path,
        verifier: Verifier,
        section: str = "reward",
        anchors: CaseAnchors | None = None,
    ) -> None:
        """Create a pool without starting worker processes. `anchors` are the measured times for adaptive deadlines of
        test cases, or None for fixed deadlines.
        """
        super().__init__(config, tokenizer_folder, section)
        self._anchors = anchors
        self._at_once, self._takes_several = config.at_once, verifier.takes_several
        self.slots = config.workers * config.at_once
        self._limit_seconds = config.deadline_seconds
        if verifier.is_async:  # after a failed call, the verifier is called again for each response
            self._limit_seconds = config.deadline_seconds * (2 if verifier.takes_several else 1) + GRACE_SECONDS

    def _start_lanes(self) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self._run_lane()) for _ in range(self._config.workers)]

    async def _run_lane(self) -> None:
        """Run one worker process after another, each until it dies or is killed after a missed deadline."""
        worker: WorkerProcess | None = None
        try:
            while True:
                worker = await self._ensure_worker(worker)
                if worker is None or not await self._wait_ready(worker):
                    worker = None
                    await self._pause_start(())
                    continue
                await _Exchange(self, worker).run()
        finally:
            if worker:
                await worker.end()

    def _name_row(self, request: ScoreRequest) -> str:
        return name_row(request.reference) if self._anchors is not None and request.adapts else ""

    def encode_job(self, job: ScoringJob) -> bytes:
        """Encode a request for a worker process, with the measured times of the request's data row."""
        if not job.row or self._anchors is None:
            return b"[%d,%s]" % (job.arrival, job.body)
        row = json.dumps([job.row, list(self._anchors.list_row(job.row).items())])
        return b"[%d,%s,%s]" % (job.arrival, job.body, row.encode())

    def note_report(self, report: DeadlineReport) -> None:
        """Store the program times that a worker process reports."""
        if self._anchors is not None:
            report.add_to(self._anchors)

    async def take(self, most: int) -> list[ScoringJob]:
        """Wait for jobs in the queue and remove up to `most` of them. A job with `alone` is not combined with other
        jobs.
        """
        jobs = [(await self._queue.get())[1]]
        while not jobs[0].alone and len(jobs) < most and not self._queue.empty():
            job = self._queue.get_nowait()[1]
            if job.alone:
                self._put(job)
                break
            jobs.append(job)
        return jobs


class _Exchange:
    """The exchange of requests and scores with one worker process, until the process ends."""

    def __init__(self, pool: ConcurrentPool, worker: WorkerProcess) -> None:
        self._pool, self._worker = pool, worker
        self._flying: dict[int, ScoringJob] = {}
        self._late: set[ScoringJob] = set()
        self._answered = asyncio.Event()
        self._busy_since = 0.0

    async def run(self) -> None:
        """Exchange requests and scores until the worker process ends; then requeue or fail the responses without a
        score.
        """
        feeding = asyncio.create_task(self._feed())
        try:
            while True:
                number, score, report = await self._worker.read_numbered_score()
                if report:
                    self._pool.note_report(report)
                if score and (job := self._land(number)):
                    self._pool._settle(job, score)
        except WorkerDied:
            pass
        finally:
            feeding.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await feeding
            self._recover()

    async def _feed(self) -> None:
        """Send queued requests to the worker process while the process runs fewer requests than allowed."""
        pool, taken = self._pool, list[ScoringJob]()
        try:
            while True:
                await self._wait_until(lambda: self._count_room() > 0)
                taken = await pool.take(self._count_room())
                if taken[0].alone:
                    await self._wait_until(lambda: not self._flying)
                self._send(taken)
                if taken[0].alone:
                    taken = []
                    await self._wait_until(lambda: not self._flying)
                taken = []
        finally:
            pool._put(*taken)

    def _count_room(self) -> int:
        if self._pool._takes_several:
            return 0 if self._flying else self._pool._at_once
        return self._pool._at_once - len(self._flying)

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._answered.clear()
            await self._answered.wait()

    def _send(self, jobs: Sequence[ScoringJob]) -> None:
        loop = asyncio.get_running_loop()
        self._busy_since = self._busy_since or time.monotonic()
        for job in jobs:
            self._flying[job.arrival] = job
            job.timer = loop.call_later(self._pool._limit_seconds, self._end_late, job)
        self._worker.send([b"[", b",".join(map(self._pool.encode_job, jobs)), b"]\n"])

    def _end_late(self, job: ScoringJob) -> None:
        self._late.add(job)
        self._worker.kill()

    def _land(self, number: int) -> ScoringJob | None:
        """Remove and return the running job with this number, or return None if no such job runs."""
        job = self._flying.pop(number, None)
        if job is not None and job.timer is not None:
            job.timer.cancel()
        if not self._flying:
            self._note_idle()
        self._answered.set()
        return job

    def _note_idle(self) -> None:
        if self._busy_since:
            self._pool.usage.busy_seconds += time.monotonic() - self._busy_since
        self._busy_since = 0.0

    def _recover(self) -> None:
        """Queue responses without a score again, except a response that was scored alone and has no try left."""
        jobs = [job for number in list(self._flying) if (job := self._land(number))]
        if len(jobs) == 1 and jobs[0] in self._late:
            self._pool._settle_late(jobs.pop())
        elif len(jobs) == 1:
            jobs[0].deaths += 1
            if jobs[0].deaths == 2:
                self._pool._settle_dead(jobs.pop())
        for job in jobs:
            job.alone = True
        self._pool._put(*jobs)
