"""A latency model of a language model: a scheduler sees a real engine, but nothing is computed.

Guarantees of the timed engine, beyond the contract in `base`:

- A response's length, tokens and ending depend only on the request's seed (or its id), its prompt and its stop strings.
- Time passes only through the event loop's own clock, so the engine runs unchanged on a virtual clock.
- There is one timer per engine, none per token. With n running requests, an event costs O(log n), and an update costs
  O(1).

All running requests share the engine: with n of them, and t tokens resident in its KV cache, each runs at `speed / (1 +
batch_slowdown * (n - 1) + kv_read_cost * t)`. One number suffices for all requests: the *work*, in seconds at full
speed, that a request would have received if it had run since the engine's start. A request that needs work w ends when
the engine's work has grown by w since the request started. The request that ends next is at the top of a heap. Between
two events n is constant and t grows linearly with the work, so time is a quadratic function of the work. The simulated
times are exact, and no code runs between two events.

With `kv_tokens`, a request starts when its tokens fit into the KV cache, with a spare block for each running request.
When the cache is full, the request that started last is preempted, as in vLLM: the preempted request goes to the head
of the queue and keeps its tokens.

An update during a response costs the response `prefill_seconds` again, as in an engine that recomputes its attention
state. An update reduces the received work of every request once, by `prefill_seconds`. `prefill_seconds_per_token`
delays the whole engine for every token that enters the cache without being sampled by this engine: the tokens of a
prompt or a prefix, and after an update all resident tokens.

With `tokens_per_tick` g, one simulated token stands for g real tokens. Lengths, work and time are computed for the real
tokens; only the arrays are shorter.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from rollflow.storage.errors import EngineFailed
from rollflow.storage.records import StopReason
from rollflow.storage.token_arrays import Float32s, Int32s
from rollflow.tasks.engines.base import Generation, GenerationRequest, InFlight, TokenSpan
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.lengths import ResponseLengths
from rollflow.tasks.engines.stop_strings import watch_stops

LOGPROB = -1.0  # log-prob of every fake token
SLACK_SECONDS = 1e-6  # most seconds that an event loop may fire a timer too early
BLOCK = 16  # tokens that vLLM allocates in its KV cache at a time
TOKEN_SLACK = 1e-6  # tolerance in tokens, because a sum of rounded times is not exact


@dataclass(eq=False, slots=True)
class _Run:
    """One request: its future tokens, and the engine's work at which it has generated all of them."""

    request: GenerationRequest
    tokens: Int32s
    ending: StopReason
    per_token: float  # work per token
    needs: float  # work for all tokens of the request
    done: asyncio.Future[Generation]
    running: bool = False
    over: bool = False
    finish: float = 0.0
    length: float = 0.0  # length of the whole response, in real tokens
    version: int = -1  # the engine's version when the request started to run
    updates: int = 0  # number of updates before the request started to run


@dataclass(slots=True)
class EngineUsage:
    """The work of an engine since it was created."""

    busy_seconds: float = 0.0  # seconds with at least one running request
    slot_seconds: float = 0.0  # running seconds, summed over the requests
    tokens: int = 0  # sampled tokens, including those of aborted responses
    restarted: int = 0  # the part of `tokens` lost because an update restarted the response
    preempted: int = 0  # requests that were preempted when the cache was full


class TimedEngine:
    """Runs `slots` requests at a time, first come, first served. See `base.Engine` for the contract of the methods."""

    def __init__(self, config: TimedEngineConfig, policy_folder: Path | None = None) -> None:
        """Build an engine; the tokenizer in `policy_folder`, if there is one, reads the text of stop strings."""
        self._config = config
        self._folder = policy_folder if policy_folder and (policy_folder / "tokenizer.json").exists() else None
        self._lengths = ResponseLengths(config)
        self._version = -1
        self._suspended = False
        self._dead: str | None = None
        self._runs: dict[str, _Run] = {}  # requests that have not ended: running, queued, or left by a dead engine
        self._queue: deque[_Run] = deque()  # may include aborted requests
        self._heap: list[tuple[float, int, _Run]] = []  # may include aborted or preempted requests
        self._started: dict[_Run, None] = {}  # the running requests, in the order of their start
        self._order = count()
        self._active = 0
        self._work = 0.0
        self._growth = 1.0 / config.seconds_per_token if config.seconds_per_token else 0.0  # tokens per unit of work
        self._bound = config.kv_tokens
        self._base = 0.0  # number of resident tokens minus n * work * growth, for n running requests
        self._held_up = 0.0  # seconds of prefill that still delay the engine
        self._since = 0.0  # time up to which the work is computed
        self._updates: list[tuple[float, int]] = []  # of each update: the work before it, and the new version
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0  # latest time at which the timer fires
        self._usage = EngineUsage()

    @property
    def version(self) -> int:
        return self._version

    @property
    def usage(self) -> EngineUsage:
        """The work of the engine up to now."""
        self._advance()
        return self._usage

    @property
    def active(self) -> int:
        """Number of started requests, suspended or not."""
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
        pass  # there are no weights to fetch

    async def update(self, version: int, weights: Path) -> None:
        self.check()
        await asyncio.sleep(self._config.update_seconds)
        self.check()
        self._advance()
        if self._active == 0:  # no running request refers to an earlier update
            self._updates.clear()
            self._work = self._base = 0.0
        self._updates.append((self._work, version))
        self._held_up = self._prefill(self._resident)
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
        """Die as a process would, for fault tests: every call raises `EngineFailed`, including calls that wait."""
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

    def _draw_run(self, request: GenerationRequest) -> _Run:
        """Draw the tokens of a response, after its prefix, and compute the work that the tokens need."""
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
        return _Run(request, request.prefix.tokens + tokens[said:], ending, per_token, needs, done, length=length)

    # --- time: the work is computed before any change, the timer is set after the change --------------------------

    @property
    def _load(self) -> float:
        """Seconds in which each running request now receives one unit of work."""
        sharing = 1.0 + self._config.batch_slowdown * (self._active - 1)
        return sharing + self._config.kv_read_cost * self._resident if self._config.kv_read_cost else sharing

    def _work_in(self, seconds: float) -> float:
        """Compute the work that each running request receives in this time from an engine of speed 1."""
        load, bend = self._load, self._bend
        return 2.0 * seconds / (load + math.sqrt(load * load + 4.0 * bend * seconds)) if bend else seconds / load

    @property
    def _resident(self) -> float:
        """Number of real tokens in the KV cache."""
        return max(0.0, self._base + self._active * self._work * self._growth)

    @property
    def _bend(self) -> float:
        """Half of the growth of the load per unit of work: the coefficient of the squared work in the time."""
        reading = self._config.kv_read_cost
        return 0.5 * reading * self._active * self._growth if reading else 0.0

    def _prefill(self, tokens: float) -> float:
        """Compute the seconds by which a prefill of this many tokens delays the engine."""
        return tokens * self._config.prefill_seconds_per_token / self._config.speed

    def _advance(self) -> None:
        """Compute the work up to the present time."""
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

        A timer that fires too early sets the next timer.
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
        # The due time is stored, because on Ray's event loop (uvloop) a timer that is already due cannot report it.
        self._timer, self._due = asyncio.get_running_loop().call_at(due, self._wake), due

    @property
    def _full(self) -> float:
        """The work at which the KV cache is full; infinite for an unlimited cache or for a request that runs alone."""
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

    def _fits(self, run: _Run) -> bool:
        """Return whether the request's tokens fit into the KV cache, with a spare block for every running request."""
        return self._resident + self._context(run) + BLOCK * (self._active + 1) <= (self._bound or 0)

    def _context(self, run: _Run) -> float:
        """Return the number of real tokens to compute before the request's first token can be sampled."""
        return self._config.prompt_tokens + len(run.request.prefix) * self._config.tokens_per_tick

    def _begin(self, run: _Run) -> None:
        run.running, run.version, run.updates = True, self._version, len(self._updates)
        run.finish = self._work + run.needs
        self._held_up += self._prefill(self._context(run))
        self._active += 1
        self._base += self._config.prompt_tokens + run.length - run.finish * self._growth
        self._started[run] = None
        heapq.heappush(self._heap, (run.finish, next(self._order), run))

    def _leave(self, run: _Run) -> None:
        """Free the request's slot and tokens; the request's entry in the heap becomes invalid."""
        self._active -= 1
        self._base -= self._config.prompt_tokens + run.length - run.finish * self._growth
        del self._started[run]
        run.running, run.finish = False, math.nan
        if self._active == 0:
            self._held_up = 0.0

    def _preempt(self) -> None:
        """Preempt the request that started last: this request waits for another slot and keeps its tokens."""
        run = next(reversed(self._started))
        said = self._read_said(run)
        self._usage.tokens += len(said) - len(run.request.prefix)
        self._usage.preempted += 1
        self._leave(run)
        run.needs = self._config.prefill_seconds + (len(run.tokens) - len(said)) * run.per_token
        run.request = replace(run.request, prefix=said)
        self._queue.appendleft(run)

    def _stop(self, run: _Run) -> None:
        """Abort a request."""
        if run.over:
            return
        self._advance()
        run.ending = StopReason.ABORTED
        self._end(run, self._count_said(run))
        self._admit()

    def _end(self, run: _Run, said: int) -> None:
        run.over = True
        self._usage.tokens += said - len(run.request.prefix)
        spoken = self._build_partial(run, said)
        if run.running:
            self._leave(run)
        if self._runs.get(run.request.id) is run:
            del self._runs[run.request.id]
        if not run.done.done():
            run.done.set_result(Generation(run.request.id, spoken, run.ending))

    # --- generated tokens --------------------------------------------------------------------------------------

    def _count_said(self, run: _Run) -> int:
        """Return the number of tokens generated up to now. The last token comes only when the response ends."""
        return self._count_said_at(run, self._work) if run.running else len(run.request.prefix)

    def _count_said_at(self, run: _Run, work: float) -> int:
        if run.per_token <= 0:
            return len(run.request.prefix)
        unsaid = math.ceil((run.finish - work) / run.per_token - TOKEN_SLACK)
        return max(len(run.request.prefix), len(run.tokens) - max(1, unsaid))

    def _read_said(self, run: _Run) -> TokenSpan:
        return self._build_partial(run, self._count_said(run))

    def _build_partial(self, run: _Run, said: int) -> TokenSpan:
        """Return the first `said` tokens, each with the engine's version at the time when the token was generated."""
        prefix = run.request.prefix
        logprobs = prefix.logprobs + Float32s.same(LOGPROB, said - len(prefix))
        versions, version = prefix.versions, run.version
        for work, later in self._updates[run.updates :] if run.running else ():
            versions += Int32s.same(version, min(said, self._count_said_at(run, work)) - len(versions))
            version = later
        versions += Int32s.same(version, said - len(versions))
        return TokenSpan(run.tokens[:said], logprobs, versions)
