"""The inference proxy: presents all engines as one engine, updates their weights and replaces failed engines.

- Requests wait in one queue (see `slots`), so any free engine can serve any request.
- A weight update suspends all engines, loads the new weights, and compares their log-probs with the learner's. An
  engine whose log-probs differ too much is closed.
- A request on a failed engine continues on another engine with the tokens generated so far. With `on_weight_update =
  "restart"`, the request starts from the beginning if the policy version has changed.
- An engine can be borrowed, for example for an evaluation, as long as another engine is alive.
- Each new engine gets the current weights, and its log-probs are checked before its first request.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rollflow.storage.errors import EngineFailed
from rollflow.storage.records import StopReason
from rollflow.tasks.engines.base import Engine, Generation, GenerationRequest, InFlight, TokenSpan
from rollflow.tasks.rollout.cache_queue import CacheLimits, CacheQueue
from rollflow.tasks.rollout.config import Routing
from rollflow.tasks.rollout.slots import EngineSlots, SlotQueue, Ticket


@dataclass(frozen=True, slots=True)
class WeightsProbe:
    """Fixed tokens, and the learner's log-probabilities (in nats) of these tokens under one policy version."""

    tokens: Sequence[int]
    expected: Sequence[float]
    tolerance: float

    def check(self, found: Sequence[float] | None) -> None:
        """Check an engine's log-probabilities against the learner's; raise `EngineFailed` if they differ too much."""
        if found is None or not self.expected:
            return
        differences = [abs(a - b) for a, b in zip(found, self.expected, strict=True)]
        if not all(difference <= self.tolerance for difference in differences):  # NaN fails this test, too
            worst = max(differences, key=lambda d: (math.isnan(d), d))
            raise EngineFailed(
                "after the weight update the engine's log-probs differ from the learner's log-probs by "
                f"{worst:.3g} nats (allowed: {self.tolerance:g} nats), so the engine's weights are not the "
                "published weights"
            )


class VersionedGeneration(NamedTuple):
    """A generation, with the policy version under which its request started."""

    generation: Generation
    version: int
    is_recalled: bool = False  # True if the generation was made before a crash, and was read from storage


@dataclass(frozen=True, slots=True)
class _NewestWeights:
    """The newest policy weights, which an engine that joins later has to load."""

    version: int
    weights: Any
    probe: WeightsProbe
    in_flight: InFlight


class RequestOptions(NamedTuple):
    """Options of a generation request, such as its priority and a callback for its start."""

    priority: float = 0.0  # the request with the lowest number runs first
    group: Hashable = None
    # called with `sample` and the engine's policy version at each start and restart of the request
    on_start: Callable[[int, int], None] | None = None
    sample: int = 0  # number of the request in its group


@dataclass(eq=False, slots=True)
class _GenerationJob:
    """A generation request in progress, with the policy version under which it started."""

    request: GenerationRequest
    asked: RequestOptions
    ticket: Ticket
    lane: EngineSlots | None = None
    started: int | None = None
    asked_at: float = 0.0  # time at which the engine got the request
    aborted: bool = False

    def build_answer(self, generation: Generation, version: int) -> VersionedGeneration:
        """Build the result of a request; `version` is the policy version to report if the request never started."""
        return VersionedGeneration(generation, version if self.started is None else self.started)

    def start(self, version: int) -> None:
        """Record the policy version under which the request starts, and call `on_start`."""
        self.started = version
        if self.asked.on_start is not None:
            self.asked.on_start(self.asked.sample, version)

    def keep_and_restart(self, kept: TokenSpan) -> None:
        """Prepare the request to continue on another engine after the tokens `kept`. If `kept` is empty, the request
        starts again from the beginning.
        """
        # A new id is needed, because an engine may still use the old id.
        self.request = replace(self.request, id=f"{self.request.id}'", prefix=kept)
        if not kept:
            self.started = None

    def build_aborted(self, had: TokenSpan) -> Generation:
        """Build the result of an aborted request from the tokens generated so far."""
        return Generation(self.request.id, had, StopReason.ABORTED)


class InferenceProxy:
    """Presents all inference engines as one engine."""

    def __init__(
        self,
        engines: Sequence[Engine],
        slots: int,
        replacement_seconds: float = 0.0,
        routing: Routing = "least-work",
        cache: CacheLimits | None = None,
    ) -> None:
        """Serve requests on the started `engines` and on engines that join later, at most `slots` requests at a time
        per engine.

        With `cache`, an episode starts only if its tokens fit into the KV cache of an engine.
        """
        self._slots = slots
        self._replacement_seconds = replacement_seconds
        self._queue = (
            CacheQueue(cache, routing, replacement_seconds) if cache else SlotQueue(routing, replacement_seconds)
        )
        for place, engine in enumerate(engines):
            self._queue.put(place, EngineSlots(engine, slots))
        self._jobs: dict[str, _GenerationJob] = {}
        self._taken: _NewestWeights | None = None
        self._changing = asyncio.Lock()  # allows only one update, join or loan of an engine at a time
        self._closing: set[asyncio.Task[None]] = set()
        self.version = -1  # newest policy version that an engine serves; unchanged if all engines die
        # called when the engines get a new policy version or an engine joins
        self.on_change: Callable[[], None] = lambda: None
        self.restarted = 0  # number of generation requests that started again from the beginning
        self.taken_over = 0  # number of generation requests that continued on another engine
        self.update_seconds = 0.0

    @property
    def running(self) -> int:
        """Number of generation requests that run on an engine or wait for an engine."""
        return len(self._jobs)

    @property
    def capacity(self) -> int:
        """Number of requests that all live engines can run at the same time.

        If no engine is alive, the capacity of one engine is returned, so that requests can wait for a replacement.
        """
        return self._slots * max(1, self._queue.alive)

    @property
    def engines(self) -> Mapping[int, Engine]:
        """The live engines, keyed by the engine's number."""
        return {place: lane.engine for place, lane in self._queue.places.items() if lane.failure is None}

    @property
    def failed(self) -> dict[int, str]:
        """The reason of the failure of each failed engine, keyed by the engine's number."""
        found = ((place, lane.failure or _find_failure(lane.engine)) for place, lane in self._queue.places.items())
        return {place: str(failure) for place, failure in found if failure}

    async def generate(self, request: GenerationRequest, asked: RequestOptions | None = None) -> VersionedGeneration:
        """Generate one response on an engine with a free slot.

        Raises:
            EngineFailed: no engine is alive, and no replacement has joined in time.
        """
        asked = asked or RequestOptions()
        job = _GenerationJob(request, asked, self._queue.create_ticket(asked.priority, asked.group))
        job.ticket.episode, job.ticket.tokens = request.episode, request.prompt.length + len(request.prefix)
        self._jobs[request.id] = job
        try:
            while True:
                job.lane = lane = await self._queue.take(job.ticket)
                if lane is None:
                    return job.build_answer(job.build_aborted(job.request.prefix), self.version)
                generation: Generation | None = None
                try:
                    # A request that arrives during a weight update starts under the new policy version.
                    if not lane.serves.is_set():
                        await lane.serves.wait()
                    if job.aborted:
                        generation = job.build_aborted(job.request.prefix)
                    elif lane.failure is None:
                        self._start(job, lane.engine)
                        generation = self._finish(lane, job, await lane.engine.generate(job.request))
                except EngineFailed as error:
                    generation = self._handle_failure(lane, job, error)
                finally:
                    job.lane = None
                    self._queue.release(lane, job.ticket)
                if generation is not None:
                    return job.build_answer(generation, self.version)
        finally:
            del self._jobs[request.id]

    def end_episode(self, episode: str) -> None:
        """Record that an episode requests no more generations."""
        self._queue.end_episode(episode)

    async def abort(self, ids: Collection[str]) -> None:
        """Abort these requests; `generate` then returns the tokens generated so far. Unknown ids are ignored."""
        running: defaultdict[EngineSlots, list[str]] = defaultdict(list)
        for job in filter(None, map(self._jobs.get, ids)):
            job.aborted = True
            if job.lane is None:
                self._queue.withdraw(job.ticket)
            else:
                running[job.lane].append(job.request.id)
        await asyncio.gather(*(self._abort(lane, ids) for lane, ids in running.items()))

    async def update(self, version: int, weights: Any, probe: WeightsProbe, in_flight: InFlight) -> None:
        """Load the weights of policy version `version` into all live engines and into all engines that join later.

        Raises:
            EngineFailed: no engine survived the update, and no engine will be replaced.
        """
        async with self._changing:
            taken = _NewestWeights(version, weights, probe, in_flight)
            await asyncio.gather(*(self._fetch(lane, taken) for lane in self._queue.live))
            began = asyncio.get_running_loop().time()
            self._taken = taken
            await asyncio.gather(*(self._update_and_serve(lane, taken) for lane in self._queue.live))
            self._note_version(version)
            self.update_seconds += asyncio.get_running_loop().time() - began
        if not self._queue.live and not self._replacement_seconds:
            raise self._queue.build_no_engine_error()

    async def join(self, place: int, engine: Engine) -> None:
        """Add a started engine in place of an old engine; the old engine's requests continue on other engines.

        Raises:
            EngineFailed: the new engine could not load the current weights, so the old engine stays.
        """
        lane = EngineSlots(engine, self._slots)
        if self._taken is not None:
            # The weights are fetched without the lock, so that no update has to wait for this engine.
            await engine.fetch(self._taken.version, self._taken.weights)
        async with self._changing:
            if self._taken is not None:
                await self._update_lane(lane, self._taken)
            if lane.failure is not None:
                raise lane.failure
            old = self._queue.put(place, lane)
            self.on_change()
        if old is not None:
            self._fail(old, EngineFailed("another engine replaced this engine"))

    @asynccontextmanager
    async def borrow_engine(self) -> AsyncIterator[Engine]:
        """Borrow one engine of the run inside a `with` block.

        The borrowed engine serves no requests of the run inside the block.

        Raises:
            EngineFailed: fewer than two engines are alive, or the borrowed engine died inside the block.
        """
        place, engine = await self._lend()
        try:
            yield engine
        finally:
            try:
                engine.check()
                if place not in self.engines:  # another engine may have got the borrowed engine's number meanwhile
                    await self.join(place, engine)
            except EngineFailed as error:  # the failed engine stays registered, so that the run restarts it
                self._queue.places.setdefault(place, EngineSlots(engine, self._slots, failure=EngineFailed(str(error))))
                raise

    async def _lend(self) -> tuple[int, Engine]:
        async with self._changing:
            live = {place: lane for place, lane in self._queue.places.items() if lane.failure is None}
            if len(live) < 2:
                raise EngineFailed("no engine can be borrowed, because fewer than two engines are alive")
            place, lane = min(live.items(), key=lambda item: item[1].taken)
            lane.failure = EngineFailed(
                "this engine is borrowed, for example for an evaluation, and takes no other requests meanwhile"
            )
            self._queue.remove(lane)
            await self._hand_over(lane)
        return place, lane.engine

    def _note_version(self, version: int) -> None:
        if version != self.version:
            self.version = version
            self.on_change()

    def _start(self, job: _GenerationJob, engine: Engine) -> None:
        """Prepare a request for an engine."""
        assert self._taken is not None, "an engine must have weights before it serves requests"
        if job.request.prefix and job.started != engine.version and self._taken.in_flight == "restart":
            self._send_again(job, TokenSpan())
        if job.started is None:  # staleness counts from the start of the request
            job.start(engine.version)
        job.asked_at = asyncio.get_running_loop().time()

    def _finish(self, lane: EngineSlots, job: _GenerationJob, generation: Generation) -> Generation | None:
        """Return the generation of a request; return None if the request has to be sent again."""
        made, seconds = len(generation.made), asyncio.get_running_loop().time() - job.asked_at
        self._queue.observe(lane, made - len(job.request.prefix), seconds)
        job.ticket.tokens = job.request.prompt.length + made
        if generation.ending is not StopReason.ABORTED or job.aborted:
            return generation
        handed_over = lane.failure is not None  # True if the engine failed; False if an update aborted the request
        self._send_again(job, generation.made if handed_over else TokenSpan())
        return None

    def _handle_failure(self, lane: EngineSlots, job: _GenerationJob, error: EngineFailed) -> Generation | None:
        reported = lane.engine.progress({job.request.id: 0}).get(job.request.id, TokenSpan())
        had = max(reported, job.request.prefix, key=len)
        self._fail(lane, error)
        if job.aborted:
            return job.build_aborted(had)
        self._send_again(job, had)
        return None

    def _send_again(self, job: _GenerationJob, kept: TokenSpan) -> None:
        if kept:
            self.taken_over += 1
        else:
            self.restarted += 1
        job.keep_and_restart(kept)

    async def _abort(self, lane: EngineSlots, ids: list[str]) -> None:
        try:
            await lane.engine.abort(ids)
        except EngineFailed as error:
            self._fail(lane, error)

    async def _fetch(self, lane: EngineSlots, to: _NewestWeights) -> None:
        """Fetch the new weights to the engine's node while the engine continues to generate."""
        try:
            await lane.engine.fetch(to.version, to.weights)
        except EngineFailed as error:
            self._fail(lane, error)

    async def _update_and_serve(self, lane: EngineSlots, to: _NewestWeights) -> None:
        await self._update_lane(lane, to)
        if lane.failure is None:
            self._note_version(to.version)
        self._queue.offer_slots(lane)

    async def _update_lane(self, lane: EngineSlots, to: _NewestWeights) -> None:
        engine = lane.engine
        lane.serves.clear()
        try:
            await engine.suspend(to.in_flight)
            await engine.update(to.version, to.weights)
            to.probe.check(await engine.logprobs(to.probe.tokens) if to.probe.expected else None)
            await engine.resume()
        except EngineFailed as error:
            self._fail(lane, error)
        finally:
            lane.serves.set()

    def _fail(self, lane: EngineSlots, error: EngineFailed) -> None:
        """Remove a failed engine and close the engine, because its process may still run."""
        if lane.failure is None:
            # The error is copied, because a traceback would keep the engine object in memory.
            lane.failure = EngineFailed(str(error))
            closing = asyncio.create_task(self._close(lane))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            self._queue.offer_slots(lane)

    async def _hand_over(self, lane: EngineSlots) -> None:
        with suppress(EngineFailed):  # requests of the dead engine have failed already
            await lane.engine.abort([job.request.id for job in self._jobs.values() if job.lane is lane])

    async def _close(self, lane: EngineSlots) -> None:
        await self._hand_over(lane)
        await lane.engine.close()


def _find_failure(engine: Engine) -> EngineFailed | None:
    try:
        engine.check()
    except EngineFailed as error:
        return error
    return None
