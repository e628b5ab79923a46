"""A latency model in place of a language model: what schedulers see of an engine, without the arithmetic.

Guarantees, beyond the contract in `base`:

- A response's length, tokens and ending are a function of the request's seed (or its id) alone.
- Time passes only through the event loop's own clock, so the engine runs under a virtual-time loop as it is.
- One timer per running request, none per token: a simulated hour of generation costs milliseconds.

An update in the middle of a response costs it `prefill_seconds` again, as an engine that recomputes its
attention state would.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollflow.storage.errors import EngineFailed
from rollflow.storage.records import Ending
from rollflow.tasks.engines.base import Generation, GenerationRequest, InFlight, Partial
from rollflow.tasks.settings import TimedEngineConfig

LOGPROB = -1.0  # of every fake token


@dataclass(eq=False, slots=True)
class _Run:
    """One request under way: what it will say, how much of it is said, and the seconds left to say the rest."""

    request: GenerationRequest
    tokens: tuple[int, ...]
    ending: Ending
    left: float
    done: asyncio.Future[Generation]
    versions: list[int] = field(default_factory=list)
    since: float = 0.0
    timer: asyncio.TimerHandle | None = None


class TimedEngine:
    """`slots` requests at a time, first come first served. See `base.Engine` for the methods' contract."""

    def __init__(self, config: TimedEngineConfig) -> None:
        self._config = config
        self._version = -1
        self._suspended = False
        self._dead: str | None = None
        self._runs: dict[str, _Run] = {}  # all that have not ended: running, queued, or left by the engine's death
        self._running: dict[str, _Run] = {}
        self._queue: deque[_Run] = deque()

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> None:
        self.check()

    async def generate(self, request: GenerationRequest) -> Generation:
        self.check()
        tokens, ending = self._answer(request)
        left = self._config.prefill_seconds + (len(tokens) - len(request.prefix)) * self._config.seconds_per_token
        done: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        run = _Run(request, tokens, ending, left, done, list(request.prefix.versions))
        self._runs[request.id] = run
        self._queue.append(run)
        self._admit()
        try:
            return await run.done
        except asyncio.CancelledError:
            self._stop(run)
            raise

    async def abort(self, ids: Sequence[str]) -> None:
        self.check()
        wanted = set(ids)
        for run in [*self._running.values(), *self._queue]:
            if run.request.id in wanted:
                self._stop(run)

    async def suspend(self, in_flight: InFlight) -> None:
        self.check()
        if not self._suspended:
            self._suspended = True
            for run in self._running.values():
                self._halt(run)
        if in_flight == "restart":
            for run in [*self._running.values(), *self._queue]:
                self._stop(run)

    async def update(self, version: int, weights: Path) -> None:
        self.check()
        await asyncio.sleep(self._config.update_seconds)
        self.check()
        self._version = version
        for run in self._running.values():
            run.left += self._config.prefill_seconds

    async def resume(self) -> None:
        self.check()
        if self._suspended:
            self._suspended = False
            for run in self._running.values():
                self._go(run)
        self._admit()

    async def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...] | None:
        self.check()
        return None

    async def close(self) -> None:
        self.kill("the timed engine is closed")

    def kill(self, why: str = "the timed engine was killed") -> None:
        """Die as a process would: every call, also the waiting ones, raises `EngineFailed`. For fault tests."""
        self._dead = self._dead or why
        self._running.clear()
        self._queue.clear()
        for run in self._runs.values():
            self._halt(run)
            if not run.done.done():
                run.done.set_exception(EngineFailed(why))

    def check(self) -> None:
        if self._dead is not None:
            raise EngineFailed(self._dead)

    def progress(self, have: Mapping[str, int]) -> dict[str, Partial]:
        found = ((id, self._runs.get(id), since) for id, since in have.items())
        return {id: self._spoken(run).after(since) for id, run, since in found if run is not None}

    def _answer(self, request: GenerationRequest) -> tuple[tuple[int, ...], Ending]:
        """Lognormal length around the median, cut at `max_new_tokens`; tokens are bytes."""
        draw = random.Random(request.id if request.seed is None else request.seed)
        length = max(1, round(self._config.median_tokens * math.exp(self._config.sigma * draw.gauss(0.0, 1.0))))
        ending = Ending.STOP if length <= request.max_new_tokens else Ending.LENGTH
        tokens = tuple(draw.randbytes(min(length, request.max_new_tokens)))
        return request.prefix.tokens + tokens[len(request.prefix) :], ending

    def _admit(self) -> None:
        while self._queue and not self._suspended and len(self._running) < self._config.slots:
            run = self._queue.popleft()
            self._running[run.request.id] = run
            self._go(run)

    def _go(self, run: _Run) -> None:
        loop = asyncio.get_running_loop()
        run.since = loop.time()
        run.timer = loop.call_later(run.left, self._finish, run)

    def _halt(self, run: _Run) -> None:
        """Stop the clock; tokens whose time has come are said, under the present version."""
        if run.timer is None:
            return
        run.timer.cancel()
        run.timer = None
        run.versions += [self._version] * self._new(run)
        run.left = self._left(run)

    def _left(self, run: _Run) -> float:
        return run.left - (asyncio.get_running_loop().time() - run.since)

    def _new(self, run: _Run) -> int:
        """Tokens said since the clock was started; the last one is said only with the end."""
        per_token = self._config.seconds_per_token
        unsaid = math.ceil(self._left(run) / per_token - 1e-9) if per_token > 0 else len(run.tokens)
        return max(0, min(len(run.tokens) - unsaid, len(run.tokens) - 1) - len(run.versions))

    def _spoken(self, run: _Run) -> Partial:
        new = 0 if run.timer is None else self._new(run)
        said = len(run.versions) + new
        logprobs = (*run.request.prefix.logprobs, *(LOGPROB,) * said)[:said]
        return Partial(run.tokens[:said], logprobs, (*run.versions, *(self._version,) * new))

    def _stop(self, run: _Run) -> None:
        self._halt(run)
        run.ending = Ending.ABORTED
        self._end(run)

    def _finish(self, run: _Run) -> None:
        run.versions += [self._version] * (len(run.tokens) - len(run.versions))
        self._end(run)

    def _end(self, run: _Run) -> None:
        if self._running.get(run.request.id) is run:
            del self._running[run.request.id]
        elif run in self._queue:
            self._queue.remove(run)
        if self._runs.get(run.request.id) is run:
            del self._runs[run.request.id]
        if not run.done.done():
            said = self._spoken(run)
            run.done.set_result(Generation(run.request.id, said.tokens, said.logprobs, said.versions, run.ending))
        self._admit()
