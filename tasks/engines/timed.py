"""Simulates an inference engine: the timed engine has realistic latency, and returns random tokens.

- A response depends only on the prompt, the stop strings and the seed (or the id) of its request.
- Time is read only from the event loop, so the engine also runs on a virtual clock.
- With n running requests, the start or end of a request costs O(log n).

With n running requests and t tokens in the KV cache, each request runs at `speed / (1 + batch_slowdown * (n - 1) +
kv_read_cost * t)`. The engine's *work* is the computing time, in seconds at full speed, that a request would have
received if it had run since the engine's start.

With `kv_tokens`, a request starts once the KV cache has room for its tokens, and for one more block for each running
request. If the KV cache is full, the request that started last is preempted, as in vLLM, and continues later.

After a turn, the tokens of an episode stay in the KV cache until its next turn, or until other requests need the room.
A turn computes only tokens of its prompt that are not in the cache. A weight update removes episodes without a running
request from the cache, and delays running responses by `prefill_seconds`.

`prefill_seconds_per_token` delays the whole engine for each prompt token and, after a weight update, for each token in
the KV cache.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from rollflow.storage.errors import EngineFailed
from rollflow.storage.records import StopReason
from rollflow.storage.token_arrays import Float32s, Int32s
from rollflow.tasks.engines.base import Generation, GenerationRequest, InFlight, TokenSpan
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.kept_episodes import KeptEpisodes
from rollflow.tasks.engines.lengths import ResponseLengths
from rollflow.tasks.engines.stop_strings import watch_stops
from rollflow.tasks.engines.timed_runs import EngineUsage, TimedRun

LOGPROB = -1.0  # log-prob of every simulated token
SLACK_SECONDS = 1e-6  # an event loop may fire a timer early by at most this time, in seconds
BLOCK = 16  # number of tokens in a block of the KV cache, as in vLLM
TOKEN_SLACK = 1e-6  # tolerance for rounding errors, in tokens


class TimedEngine:
    """A simulated engine that runs up to `max_concurrent_requests` requests at a time, first come, first served."""

    def __init__(self, config: TimedEngineConfig, policy_folder: Path | None = None) -> None:
        """Create a timed engine; stop strings are searched with the tokenizer in `policy_folder`, if there is one."""
        self._config = config
        self._folder = policy_folder if policy_folder and (policy_folder / "tokenizer.json").exists() else None
        self._lengths = ResponseLengths(config)
        self._version = -1
        self._suspended = False
        self._dead: str | None = None
        # requests that have not ended: they are running, queued, or left by a dead engine
        self._runs: dict[str, TimedRun] = {}
        self._queue: deque[TimedRun] = deque()  # may include aborted requests
        self._heap: list[tuple[float, int, TimedRun]] = []  # may include requests that were aborted or preempted
        self._started: dict[TimedRun, None] = {}  # the running requests, in the order of their start
        self._order = count()
        self._active = 0
        self._work = 0.0
        self._growth = 1.0 / config.seconds_per_token if config.seconds_per_token else 0.0  # tokens per unit of work
        self._bound = config.kv_tokens
        self._base = 0.0  # number of tokens in the KV cache, minus active * work * growth
        self._kept = KeptEpisodes(self._bound is not None or config.prefill_seconds_per_token > 0)
        self._held_up = 0.0  # remaining seconds of prefill that delay all requests
        self._since = 0.0  # time of the last update of `_work`, by the event loop's clock
        # (engine's work before a weight update, new policy version), for each update
        self._updates: list[tuple[float, int]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0  # time, on the event loop's clock, for which the timer is set
        self._usage = EngineUsage()

    @property
    def version(self) -> int:
        return self._version

    @property
    def usage(self) -> EngineUsage:
        """Counters of the timed engine's work, up to the present time."""
        self._advance()
        return self._usage

    @property
    def active(self) -> int:
        """Number of requests that have started and not ended, including suspended ones."""
        return self._active

    async def start(self) -> None:
        self.check()

    async def generate(self, request: GenerationRequest) -> Generation:
        self.check()
        run = self._draw_run(request)
        self._runs[request.id] = run
        self._queue.append(run)
        self._advance()
        self._admit()
        try:
            return await run.done
        except asyncio.CancelledError:
            self._stop(run)
            raise

    async def abort(self, ids: Sequence[str]) -> None:
        self.check()
        for run in [self._runs[id] for id in ids if id in self._runs]:
            self._stop(run)

    async def suspend(self, in_flight: InFlight) -> None:
        self.check()
        self._advance()
        self._suspended = True
        if in_flight == "restart":
            for run in list(self._runs.values()):
                self._usage.restarted += self._count_said(run)
                self._stop(run)
        self._pace()

    async def fetch(self, version: int, weights: Path) -> None:
        pass  # a timed engine has no weights to fetch

    async def update(self, version: int, weights: Path) -> None:
        self.check()
        await asyncio.sleep(self._config.update_seconds)
        self.check()
        self._advance()
        if self._active == 0:  # the list is cleared, because no running request started before the last update
            self._updates.clear()
            self._work = self._base = 0.0
        self._updates.append((self._work, version))
        self._held_up = self._prefill(self._resident)
        self._kept.clear()
        self._work -= self._config.prefill_seconds
        self._version = version

    async def resume(self) -> None:
        self.check()
        self._advance()
        self._suspended = False
        self._admit()

    async def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...] | None:
        self.check()
        return None

    async def close(self) -> None:
        self.kill("the timed engine is closed")

    def kill(self, why: str = "the timed engine was killed") -> None:
        """Simulate the death of the engine's process: every call, including a waiting one, raises `EngineFailed`."""
        if self._dead is not None:
            return
        self._advance()
        self._dead = why
        self._queue.clear()
        self._heap.clear()
        self._pace()
        for run in self._runs.values():
            self._usage.tokens += self._count_said(run) - len(run.request.prefix)
            if not run.done.done():
                run.done.set_exception(EngineFailed(why))

    def check(self) -> None:
        if self._dead is not None:
            raise EngineFailed(self._dead)

    def progress(self, have: Mapping[str, int]) -> dict[str, TokenSpan]:
        self._advance()
        found = ((id, self._runs.get(id), since) for id, since in have.items())
        return {id: self._read_said(run).after(since) for id, run, since in found if run is not None}

    def _draw_run(self, request: GenerationRequest) -> TimedRun:
        """Draw the tokens that continue a request's prefix, and compute the seconds of work for these tokens."""
        config, draw = self._config, random.Random(request.id if request.seed is None else request.seed)
        prompt = request.prompt.read_tokens("the timed engine")
        wanted, longest = self._lengths.draw(prompt, draw), request.max_new_tokens * config.tokens_per_tick
        ending = StopReason.STOP if wanted <= longest else StopReason.LENGTH
        length: float = min(wanted, longest)
        tokens = Int32s.of(draw.randbytes(max(1, round(length / config.tokens_per_tick))))
        per_token = length * config.seconds_per_token / len(tokens)
        said = len(request.prefix)
        if end := watch_stops(request.stop, self._folder).find_end(tokens):
            length, tokens, ending = length * end / len(tokens), tokens[:end], StopReason.STOP
        needs = config.prefill_seconds + (len(tokens) - said) * per_token
        done: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        before = config.prompt_tokens + request.earlier * config.tokens_per_tick
        given = request.prefix.tokens + tokens[said:]
        return TimedRun(request, given, ending, per_token, needs, done, length=length, before=before)

    # --- time: `_advance` updates the engine's work before any change, and `_pace` sets the timer after it --------

    @property
    def _load(self) -> float:
        """Number of seconds in which a running request receives one second of work, at speed 1."""
        sharing = 1.0 + self._config.batch_slowdown * (self._active - 1)
        return sharing + self._config.kv_read_cost * self._resident if self._config.kv_read_cost else sharing

    def _work_in(self, seconds: float) -> float:
        """Compute the seconds of work that each running request receives in `seconds`, at speed 1."""
        load, bend = self._load, self._bend
        return 2.0 * seconds / (load + math.sqrt(load * load + 4.0 * bend * seconds)) if bend else seconds / load

    @property
    def _resident(self) -> float:
        """Number of real tokens in the KV cache."""
        return max(0.0, self._base + self._active * self._work * self._growth)

    @property
    def _bend(self) -> float:
        """Coefficient of the squared work in the formula for time: half the growth of `_load` per second of work."""
        reading = self._config.kv_read_cost
        return 0.5 * reading * self._active * self._growth if reading else 0.0

    def _prefill(self, tokens: float) -> float:
        """Compute the number of seconds by which the prefill of `tokens` real tokens delays the engine."""
        return tokens * self._config.prefill_seconds_per_token / self._config.speed

    def _advance(self) -> None:
        """Update the engine's work to the present time."""
        now = asyncio.get_running_loop().time()
        passed, self._since = now - self._since, now
        if self._active and not self._suspended and self._dead is None:
            self._usage.busy_seconds += passed
            self._usage.slot_seconds += passed * self._active
            if self._held_up:
                passed, self._held_up = max(0.0, passed - self._held_up), max(0.0, self._held_up - passed)
            self._work += self._work_in(passed * self._config.speed)

    def _pace(self) -> None:
        """Set a timer for the time at which the next response ends or the KV cache is full.

        If the timer fires too early, a new timer is set.
        """
        heap = self._heap
        while heap and heap[0][2].finish != heap[0][0]:
            heapq.heappop(heap)
        timer = self._timer
        if self._suspended or not heap:
            if timer is not None:
                timer.cancel()
                self._timer = None
            return
        work = max(0.0, min(heap[0][0], self._full) - self._work)
        due = self._since + self._held_up + work * (self._load + self._bend * work) / self._config.speed
        if timer is not None:
            if self._due <= due:
                return
            timer.cancel()
        # The due time is stored, because a timer of Ray's event loop (uvloop) does not report its time once it is due.
        self._timer, self._due = asyncio.get_running_loop().call_at(due, self._wake), due

    @property
    def _full(self) -> float:
        """The engine's work at which the KV cache will be full, or infinity if the cache cannot become full."""
        if self._bound is None or self._active < 2 or not self._growth:
            return math.inf
        return (self._bound - self._base) / (self._active * self._growth)

    def _wake(self) -> None:
        self._timer = None
        self._advance()
        heap, reached = self._heap, self._work + SLACK_SECONDS
        while heap and (heap[0][0] <= reached or heap[0][2].finish != heap[0][0]):
            finish, _, run = heapq.heappop(heap)
            if run.finish == finish:
                self._end(run, len(run.tokens))
        while self._full <= reached:
            self._preempt()
        self._admit()

    def _admit(self) -> None:
        queue = self._queue
        while queue and not self._suspended and self._active < self._config.max_concurrent_requests:
            run = queue[0]
            if not run.over:
                if self._bound is not None and self._active and not self._fits(run):
                    break
                self._begin(run)
            queue.popleft()
        self._pace()

    def _fits(self, run: TimedRun) -> bool:
        """Return whether a request's tokens fit into the KV cache, with a free block for every running request."""
        return self._resident + self._context(run) + BLOCK * (self._active + 1) <= (self._bound or 0)

    def _context(self, run: TimedRun) -> float:
        """Return the number of prompt and prefix tokens that the engine computes before it generates."""
        return run.before + len(run.request.prefix) * self._config.tokens_per_tick

    def _begin(self, run: TimedRun) -> None:
        run.running, run.version, run.updates = True, self._version, len(self._updates)
        run.finish = self._work + run.needs
        self._held_up += self._prefill(self._read_context(run))
        self._active += 1
        self._base += run.before + run.length - run.finish * self._growth
        self._started[run] = None
        self._trim()
        heapq.heappush(self._heap, (run.finish, next(self._order), run))

    def _read_context(self, run: TimedRun) -> float:
        """Use the episode's tokens in the cache for its new request; return the number of tokens left to compute."""
        self._trim()
        context = self._context(run)
        run.cached = min(context, self._kept.take(run.request.episode))
        self._usage.context += context
        self._usage.cached += run.cached
        return context - run.cached

    def _trim(self) -> None:
        """Evict episodes without a running request until the running requests have enough room."""
        if self._bound is not None:
            self._kept.evict(self._bound - self._resident)

    def _leave(self, run: TimedRun) -> None:
        """Free the slot and the cached tokens of a request, and invalidate its entry in the heap."""
        self._active -= 1
        self._base -= run.before + run.length - run.finish * self._growth
        del self._started[run]
        run.running, run.finish = False, math.nan
        if self._active == 0:
            self._held_up = 0.0

    def _preempt(self) -> None:
        """Preempt the request that started last, which keeps its tokens and waits for another slot."""
        run = next(reversed(self._started))
        said = self._read_said(run)
        self._usage.tokens += len(said) - len(run.request.prefix)
        self._usage.preempted += 1
        self._leave(run)
        run.needs = self._config.prefill_seconds + (len(run.tokens) - len(said)) * run.per_token
        run.request = replace(run.request, prefix=said)
        self._queue.appendleft(run)

    def _stop(self, run: TimedRun) -> None:
        """Abort a request."""
        if run.over:
            return
        self._advance()
        run.ending = StopReason.ABORTED
        self._end(run, self._count_said(run))
        self._admit()

    def _end(self, run: TimedRun, said: int) -> None:
        run.over = True
        self._usage.tokens += said - len(run.request.prefix)
        spoken = self._build_partial(run, said)
        if run.running:
            self._leave(run)
            if run.ending is not StopReason.ABORTED:
                self._kept.put(run.request.episode, run.before + run.length)
                self._trim()
        if self._runs.get(run.request.id) is run:
            del self._runs[run.request.id]
        if not run.done.done():
            cached = int(run.cached / self._config.tokens_per_tick)
            run.done.set_result(Generation(run.request.id, spoken, run.ending, cached))

    # --- generated tokens --------------------------------------------------------------------------------------

    def _count_said(self, run: TimedRun) -> int:
        """Return the number of tokens that a request has generated, without the newest one of a running request."""
        return self._count_said_at(run, self._work) if run.running else len(run.request.prefix)

    def _count_said_at(self, run: TimedRun, work: float) -> int:
        if run.per_token <= 0:
            return len(run.request.prefix)
        unsaid = math.ceil((run.finish - work) / run.per_token - TOKEN_SLACK)
        return max(len(run.request.prefix), len(run.tokens) - max(1, unsaid))

    def _read_said(self, run: TimedRun) -> TokenSpan:
        return self._build_partial(run, self._count_said(run))

    def _build_partial(self, run: TimedRun, said: int) -> TokenSpan:
        """Return the first `said` tokens of a response, each with the policy version that generated the token."""
        prefix = run.request.prefix
        logprobs = prefix.logprobs + Float32s.same(LOGPROB, said - len(prefix))
        versions, version = prefix.versions, run.version
        for work, later in self._updates[run.updates :] if run.running else ():
            versions += Int32s.same(version, min(said, self._count_said_at(run, work)) - len(versions))
            version = later
        versions += Int32s.same(version, said - len(versions))
        return TokenSpan(run.tokens[:said], logprobs, versions)
