"""The pool of reward workers: every response gets a score, at the latest at its deadline.

A worker that does not answer in time is killed and replaced; its response scores 0 with the reason "deadline".
A worker that dies is replaced, and its response is tried once more. So no verifier can block the pool.
The death of a worker that was not ready does not count against a response. After `START_TRIES` times `workers` such
deaths in a row the run fails.

    queue --up to AHEAD_SECONDS of work--> worker --scores, in order--> their callers
      ^                                        |
      +---- responses behind a slow one <------+   and another worker takes over until the slow score is there

So a slow score delays other responses by at most `SLOW_SECONDS`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollflow.storage.errors import ConfigError, RollflowError
from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.runtime.actor_warnings import open_socket
from rollflow.tasks.scorers import build_verifier
from rollflow.tasks.scorers.base import Score, failure_score
from rollflow.tasks.scorers.config import ImportReward, RewardConfig

CHUNK = 32  # most responses sent to a worker at once; sending each response on its own would cost too much
AHEAD_SECONDS = 0.1  # most seconds of work sent at once, because responses behind a slow response are scored twice
SLOW_SECONDS = 1.0  # a score that takes longer delays no other response
START_TRIES = 5
AGAIN_SECONDS = 0.5  # pause before the next try to start a worker
READY = b"ready\n"


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One response to score; a flat array of tokens needs no conversion."""

    tokens: Sequence[int]
    reference: Mapping[str, Any]

    def encode_line(self) -> bytes:
        """Encode the request as a line for the worker: the tokens' bytes in hexadecimal, and the reference."""
        asked = {"tokens": Int32s.of(self.tokens).data.hex(), "reference": dict(self.reference)}
        return json.dumps(asked).encode() + b"\n"


class RewardPool:
    """The worker processes and their queue. See the module's docstring.

    Each lane runs one worker process at a time. There are twice as many lanes as `workers`, and one turn for each of
    the `workers`. A lane takes responses only while it has a turn, and passes the turn to another lane while its own
    worker is slow. So more processes than `workers` are started only if a worker is slow.
    """

    def __init__(self, config: RewardConfig, tokenizer_folder: Path) -> None:
        self._config = config
        self._command = [sys.executable, "-m", "rollflow.tasks.scorers.worker"]
        self._command += [config.model_dump_json(), str(tokenizer_folder), str(open_socket().fileno())]
        self._queue: asyncio.PriorityQueue[tuple[int, _ScoringJob]] = asyncio.PriorityQueue()  # sorted by arrival
        self._arrivals = itertools.count()
        self._turns = asyncio.Semaphore(config.workers)
        self._quick = min(SLOW_SECONDS, config.deadline_seconds)
        self._pace = SLOW_SECONDS  # seconds per score of recent responses
        self._lanes: list[asyncio.Task[None]] = []
        self._unready, self._tries = 0, START_TRIES * config.workers  # failed starts in a row
        self._hopeless = asyncio.Event()
        self._error = ConfigError("no worker was tried")
        self.scored = 0
        self.timeouts = 0
        self.busy_seconds = 0.0

    async def start(self) -> None:
        """Start the workers; raise `ConfigError` if a user-defined verifier cannot be imported on this machine."""
        if isinstance(self._config, ImportReward):  # without this check, each worker would die of a failed import
            await asyncio.to_thread(build_verifier, self._config)
        count = self._config.workers
        self._lanes = [asyncio.create_task(self._run_lane(first=number < count)) for number in range(2 * count)]

    def submit(self, requests: Sequence[ScoreRequest]) -> list[asyncio.Future[Score]]:
        """Queue requests and return the futures of their scores, in order."""
        futures: list[asyncio.Future[Score]] = [asyncio.get_running_loop().create_future() for _ in requests]
        for request, future in zip(requests, futures, strict=True):
            try:
                self._put(_ScoringJob(next(self._arrivals), request.encode_line(), future))
            except (TypeError, ValueError) as error:  # a user-defined environment passed an invalid request
                future.set_result(failure_score("request", error))
        return futures

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Score requests and return all scores, in order."""
        return list(await asyncio.gather(*self.submit(requests)))

    async def serve(self, finished: asyncio.Event) -> None:
        """Wait until `finished` is set, then end the workers; raise `ConfigError` if no worker becomes ready."""
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
        """End the workers."""
        for lane in self._lanes:
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)

    def _put(self, *jobs: _ScoringJob) -> None:
        for job in jobs:
            self._queue.put_nowait((job.arrival, job))

    async def _take(self) -> deque[_ScoringJob]:
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
        worker: _Worker | None = None
        has_turn = False
        try:
            while True:
                if not has_turn:
                    await self._turns.acquire()
                has_turn = True
                jobs = deque[_ScoringJob]() if first and worker is None else await self._take()
                worker = await self._ensure_worker(worker)
                if worker is None or not await self._wait_ready(worker):
                    worker = None
                    self._put(*jobs)
                    if self._unready >= self._tries:
                        self._give_up()
                    await asyncio.sleep(AGAIN_SECONDS)
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

    async def _ensure_worker(self, worker: _Worker | None) -> _Worker | None:
        """Return this worker if it lives, otherwise a new one; None if no process or pipe is available."""
        try:
            return worker if worker and worker.alive else await _Worker.start(self._command)
        except OSError:
            return None

    async def _wait_ready(self, worker: _Worker) -> bool:
        """Return True if the worker has finished its imports, False if the worker has ended."""
        try:
            await worker.wait_ready(self._config.start_seconds)
        except NotReady as error:
            self._unready += 1
            config = self._config
            key = f"path = {config.path!r}" if isinstance(config, ImportReward) else f"kind = {config.kind!r}"
            tries = f"{self._tries} workers in a row did not get ready; the last one: {error}"
            self._error = ConfigError(f"reward.{key}: {tries}")
            return False
        self._unready = 0
        return True

    def _give_up(self) -> None:
        """Fail all waiting requests, and the pool itself."""
        self._hopeless.set()
        while not self._queue.empty():
            _, job = self._queue.get_nowait()
            if not job.future.done():
                job.future.set_exception(self._error)

    async def _serve(self, worker: _Worker, jobs: deque[_ScoringJob]) -> int | None:
        """Send the jobs in one write and read their scores one by one; requeue the jobs without a score at the end.

        If a job is slow, the jobs behind the slow job are requeued immediately, and the turn is passed to another lane.
        In this case return the number of these jobs.
        """
        started, handed_over = time.monotonic(), None
        try:
            worker.send([job.line for job in jobs])
            while jobs:
                try:
                    score = await worker.read_score(self._quick)
                except TimeoutError:
                    handed_over = self._pass_on(jobs)
                    score = await worker.read_score(self._config.deadline_seconds - self._quick)
                self._settle(jobs.popleft(), score)
        except TimeoutError:
            await worker.end()
            self.timeouts += 1
            seconds = self._config.deadline_seconds
            self._settle(jobs.popleft(), Score(0.0, f"deadline: no verdict in {seconds:g} s", seconds))
        except WorkerDied:
            jobs[0].deaths += 1
            if jobs[0].deaths == 2:
                self._settle(jobs.popleft(), Score(0.0, "the reward worker died twice on this response"))
        self._put(*jobs)
        self.busy_seconds += time.monotonic() - started
        return handed_over

    def _pass_on(self, jobs: deque[_ScoringJob]) -> int:
        """Leave only the first job with the worker; requeue the other jobs and return their number."""
        others = [jobs.pop() for _ in range(len(jobs) - 1)]
        self._put(*others)
        self._turns.release()
        return len(others)

    def _settle(self, job: _ScoringJob, score: Score) -> None:
        self.scored += 1
        self._pace += (score.seconds - self._pace) / 2
        if not job.future.done():
            job.future.set_result(score)


@dataclass(slots=True)
class _ScoringJob:
    """A request in the queue or with a worker."""

    arrival: int
    line: bytes  # the request as the worker reads it
    future: asyncio.Future[Score]
    deaths: int = 0


class WorkerDied(RollflowError):
    """Raised when a reward worker's process has ended."""


class NotReady(RollflowError):
    """Raised when a worker ended before it was ready."""


class _Worker:
    """A worker process and its pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._is_ready = False

    @classmethod
    async def start(cls, command: Sequence[str]) -> _Worker:
        """Start a worker process."""
        pipe = asyncio.subprocess.PIPE
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, env=environment, pass_fds=(open_socket().fileno(),)
        )
        return cls(process)

    @property
    def alive(self) -> bool:
        """True if the process runs."""
        return self._process.returncode is None

    async def wait_ready(self, seconds: float) -> None:
        """Wait until the worker has finished its imports; raise `NotReady` if it ends or takes longer than
        `seconds`.
        """
        if self._is_ready:
            return
        try:
            line = await self._read_line(seconds)
        except TimeoutError:
            await self.end()
            raise NotReady(f"it took more than reward.start_seconds = {seconds:g}; set more") from None
        except WorkerDied:
            raise NotReady(f"it ended with code {self._process.returncode}") from None
        if line != READY:  # the line has the reason why the worker is not ready
            await self.end()
            raise NotReady(line.decode(errors="replace").strip())
        self._is_ready = True

    def send(self, lines: Sequence[bytes]) -> None:
        """Send requests; their scores come back in order."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"".join(lines))

    async def read_score(self, seconds: float) -> Score:
        """Read the next score; raise `TimeoutError` after `seconds`, `WorkerDied` if the process has ended."""
        line = await self._read_line(seconds)
        try:
            return Score(*json.loads(line))
        except (ValueError, TypeError):
            await self.end()
            raise WorkerDied("it wrote no valid score") from None

    async def discard_scores(self, count: int, deadline: float) -> None:
        """Discard `count` scores of requests that another worker has taken over; end the worker after `deadline`."""
        try:
            for _ in range(count if self.alive else 0):
                await self._read_line(deadline)
        except (TimeoutError, WorkerDied):
            await self.end()

    async def _read_line(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                line = await self._process.stdout.readline()
        except ValueError:  # no score is as long as this line, so the start of the next line is unknown
            await self.end()
            raise WorkerDied("it wrote no valid score") from None
        if not line:
            await self._process.wait()
            raise WorkerDied("it ended without an answer")
        return line

    async def end(self) -> None:
        """Kill the process and wait until it has ended."""
        if self.alive:
            self._process.kill()
        await self._process.wait()
