"""The pool of reward workers: every response gets a score, at the latest at its deadline.

A worker that does not answer in time is killed and replaced; its response scores 0 with the reason "deadline".
A worker that dies is replaced, and its response is tried once more. Nothing a verifier does can hang the pool.
A worker that dies before it is ready is no response's fault: after `START_TRIES` times `workers` in a row the run ends.

    queue --as many as take AHEAD_SECONDS--> worker --verdicts, in order--> their callers
      ^                                         |
      +---- the others behind a slow one <------+   and another worker stands in until it has its verdict

So a slow verdict holds nobody up but for `SLOW_SECONDS`.
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
from rollflow.tasks.runtime.actor_warnings import ear
from rollflow.tasks.verifiers import build_verifier
from rollflow.tasks.verifiers.base import Score, failed
from rollflow.tasks.verifiers.config import ImportReward, RewardConfig

CHUNK = 32  # responses handed to a worker at a time: a write and a wake-up each would cost more than the verdict;
AHEAD_SECONDS = 0.1  # but no more than take it so long: those behind a slow one are judged twice
SLOW_SECONDS = 1.0  # a verdict that takes longer holds up no other
START_TRIES = 5
AGAIN_SECONDS = 0.5  # before another try to start one
READY = b"ready\n"


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One response to judge, by its tokens; flat, where nobody is to pay for them again."""

    tokens: Sequence[int]
    reference: Mapping[str, Any]

    def line(self) -> bytes:
        """The request as the worker reads it: the tokens' bytes, in hexadecimal digits, and the reference."""
        asked = {"tokens": Int32s.of(self.tokens).data.hex(), "reference": dict(self.reference)}
        return json.dumps(asked).encode() + b"\n"


class RewardPool:
    """Worker processes and the queue before them. See the module's docstring.

    There are twice as many lanes as workers, and a turn for each worker: a lane takes responses only while it has a
    turn, and passes it on while its worker is slow. So a second process is started only where one is needed.
    """

    def __init__(self, config: RewardConfig, tokenizer_folder: Path) -> None:
        self._config = config
        self._command = [sys.executable, "-m", "rollflow.tasks.verifiers.worker"]
        self._command += [config.model_dump_json(), str(tokenizer_folder), str(ear().fileno())]
        self._queue: asyncio.PriorityQueue[tuple[int, _Job]] = asyncio.PriorityQueue()  # by arrival
        self._arrivals = itertools.count()
        self._turns = asyncio.Semaphore(config.workers)
        self._quick = min(SLOW_SECONDS, config.deadline_seconds)
        self._pace = SLOW_SECONDS  # what a verdict took lately, in seconds
        self._lanes: list[asyncio.Task[None]] = []
        self._unready, self._tries = 0, START_TRIES * config.workers  # in a row; all may fail at one moment
        self._hopeless = asyncio.Event()
        self._error = ConfigError("no worker was tried")
        self.scored = 0
        self.timeouts = 0
        self.busy_seconds = 0.0

    async def start(self) -> None:
        """Start the workers; `ConfigError` where a verifier of a person's own is not to be had on this machine."""
        if isinstance(self._config, ImportReward):  # else the workers died of it, and every response scored 0
            await asyncio.to_thread(build_verifier, self._config)
        count = self._config.workers
        self._lanes = [asyncio.create_task(self._lane(first=number < count)) for number in range(2 * count)]

    def submit(self, requests: Sequence[ScoreRequest]) -> list[asyncio.Future[Score]]:
        """The scores to come, in the order of the requests."""
        futures: list[asyncio.Future[Score]] = [asyncio.get_running_loop().create_future() for _ in requests]
        for request, future in zip(requests, futures, strict=True):
            try:
                self._put(_Job(next(self._arrivals), request.line(), future))
            except (TypeError, ValueError) as error:  # what an environment of a person's own asked
                future.set_result(failed("request", error))
        return futures

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Scores in the order of the requests, once all are there."""
        return list(await asyncio.gather(*self.submit(requests)))

    async def serve(self, finished: asyncio.Event) -> None:
        """Return once that is set, and the workers are ended; `ConfigError` once none of them gets ready."""
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

    def _put(self, *jobs: _Job) -> None:
        for job in jobs:
            self._queue.put_nowait((job.arrival, job))

    async def _take(self) -> deque[_Job]:
        """The next few responses; of slow ones a single one."""
        jobs = deque([(await self._queue.get())[1]])
        while not self._queue.empty() and len(jobs) < CHUNK and len(jobs) * self._pace < AHEAD_SECONDS:
            jobs.append(self._queue.get_nowait()[1])
        return jobs

    async def _lane(self, *, first: bool) -> None:
        """One worker after another, each fed until it dies or misses a deadline. One of the `first` lanes has its
        worker before there is anything to score, so that it has made its imports by then."""
        worker: _Worker | None = None
        has_turn = False
        try:
            while True:
                if not has_turn:
                    await self._turns.acquire()
                has_turn = True
                jobs = deque[_Job]() if first and worker is None else await self._take()
                worker = await self._living(worker)
                if worker is None or not await self._gets_ready(worker):
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
                    await worker.skip(handed_over, self._config.deadline_seconds)
        finally:
            if worker:
                await worker.end()

    async def _living(self, worker: _Worker | None) -> _Worker | None:
        """This worker if it lives, or else a new one; None where no process is to be had, or no pipe."""
        try:
            return worker if worker and worker.alive else await _Worker.start(self._command)
        except OSError:
            return None

    async def _gets_ready(self, worker: _Worker) -> bool:
        """Whether it made its imports; if not, it has ended."""
        try:
            await worker.ready(self._config.start_seconds)
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
        """Tell whoever waits for a score, and who watches over the pool."""
        self._hopeless.set()
        while not self._queue.empty():
            _, job = self._queue.get_nowait()
            if not job.future.done():
                job.future.set_exception(self._error)

    async def _serve(self, worker: _Worker, jobs: deque[_Job]) -> int | None:
        """Send the jobs in one write, take verdicts one by one; what has none in the end goes back into the queue.

        If one is slow, those behind it go back at once and the turn is passed on: then their number is returned.
        """
        started, handed_over = time.monotonic(), None
        try:
            worker.send([job.line for job in jobs])
            while jobs:
                try:
                    score = await worker.verdict(self._quick)
                except TimeoutError:
                    handed_over = self._pass_on(jobs)
                    score = await worker.verdict(self._config.deadline_seconds - self._quick)
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

    def _pass_on(self, jobs: deque[_Job]) -> int:
        """Leave a worker alone with the first job; returns how many others it had."""
        others = [jobs.pop() for _ in range(len(jobs) - 1)]
        self._put(*others)
        self._turns.release()
        return len(others)

    def _settle(self, job: _Job, score: Score) -> None:
        self.scored += 1
        self._pace += (score.seconds - self._pace) / 2
        if not job.future.done():
            job.future.set_result(score)


@dataclass(slots=True)
class _Job:
    """A request on its way to its score: in the queue, or with one worker."""

    arrival: int
    line: bytes  # the request, as the worker reads it
    future: asyncio.Future[Score]
    deaths: int = 0


class WorkerDied(RollflowError):
    """A reward worker's process ended."""


class NotReady(RollflowError):
    """It ended before it could be asked anything."""


class _Worker:
    """One process and its pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._is_ready = False

    @classmethod
    async def start(cls, command: Sequence[str]) -> _Worker:
        """Start a process."""
        pipe = asyncio.subprocess.PIPE
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, env=environment, pass_fds=(ear().fileno(),)
        )
        return cls(process)

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.returncode is None

    async def ready(self, seconds: float) -> None:
        """Return when it has imported what it needs; `NotReady` if it ended, or takes longer than that."""
        if self._is_ready:
            return
        try:
            line = await self._line(seconds)
        except TimeoutError:
            await self.end()
            raise NotReady(f"it took more than reward.start_seconds = {seconds:g}; set more") from None
        except WorkerDied:
            raise NotReady(f"it ended with code {self._process.returncode}") from None
        if line != READY:  # it says why not
            await self.end()
            raise NotReady(line.decode(errors="replace").strip())
        self._is_ready = True

    def send(self, lines: Sequence[bytes]) -> None:
        """Hand over requests; their verdicts come in order."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"".join(lines))

    async def verdict(self, seconds: float) -> Score:
        """The next verdict; `TimeoutError` after `seconds` (it is still to come), `WorkerDied` if the process ended."""
        line = await self._line(seconds)
        try:
            return Score(*json.loads(line))
        except (ValueError, TypeError):
            await self.end()
            raise WorkerDied("it said what is no verdict") from None

    async def skip(self, count: int, deadline: float) -> None:
        """Let `count` verdicts go by that others have given; it is ended if it does not come to the end of them."""
        try:
            for _ in range(count if self.alive else 0):
                await self._line(deadline)
        except (TimeoutError, WorkerDied):
            await self.end()

    async def _line(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                line = await self._process.stdout.readline()
        except ValueError:  # longer than any verdict: where the next one begins is not known
            await self.end()
            raise WorkerDied("it said what is no verdict") from None
        if not line:
            await self._process.wait()
            raise WorkerDied("it ended without an answer")
        return line

    async def end(self) -> None:
        """End it and see it gone."""
        if self.alive:
            self._process.kill()
        await self._process.wait()
