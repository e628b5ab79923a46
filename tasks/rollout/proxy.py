"""The inference proxy: all engines as one. It takes them through weight updates and replaces the dead.

- Requests wait in one queue; `slots` says who goes where and when.
- `update` suspends, updates, probes and resumes all engines at once. An engine whose log-probs differ from the
  learner's is closed before it makes a token. A request that arrives meanwhile starts under the new version.
- The requests of a failed engine go on at another one with the tokens they have, and keep the version under which they
  were first started. Only if tokens of two versions may not mix (`in_flight = "restart"`) do they start again.
- A request that an update aborted (`in_flight = "restart"`) starts again under the new version. A request that `abort`
  ended keeps the tokens it has.
- An engine can be lent while another one lives. Its requests go on elsewhere, as if it had failed; then it joins again.
- An engine that joins has the present version, probed, before it gets a request. A failed one is closed at once.
- `version` is the new one as soon as one engine serves it. No other engine takes a request before it has it, too.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from rollflow.storage.errors import EngineFailed
from rollflow.storage.records import Ending
from rollflow.tasks.engines.base import Engine, Generation, GenerationRequest, InFlight, Partial
from rollflow.tasks.rollout.config import Routing
from rollflow.tasks.rollout.slots import Lane, SlotQueue, Ticket


@dataclass(frozen=True, slots=True)
class Probe:
    """Fixed tokens and what the learner says of them under one version (nats)."""

    tokens: Sequence[int]
    expected: Sequence[float]
    tolerance: float

    def check(self, found: Sequence[float] | None) -> None:
        """Raise `EngineFailed` where the engine disagrees; an engine without a model (None) is not probed."""
        if found is None or not self.expected:
            return
        differences = [abs(a - b) for a, b in zip(found, self.expected, strict=True)]
        if not all(difference <= self.tolerance for difference in differences):  # false for NaN, too
            worst = max(differences, key=lambda d: (math.isnan(d), d))
            raise EngineFailed(
                f"after the weight update the engine's log-probs differ from the learner's by {worst:.3g} nats "
                f"(allowed: {self.tolerance:g}); its weights are not the published ones"
            )


@dataclass(frozen=True, slots=True)
class Started:
    """A generation and the version its request was started under."""

    generation: Generation
    version: int


@dataclass(frozen=True, slots=True)
class _Taken:
    """The newest weights: every engine has them, or takes them when it joins."""

    version: int
    weights: Any
    probe: Probe
    in_flight: InFlight


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How to treat a request: its priority, which requests share its prompt, whom to tell that it starts."""

    priority: float = 0.0  # the lowest goes first
    group: Hashable = None
    on_start: Callable[[int], None] | None = None  # called with the version it starts under; again if it starts again


@dataclass(eq=False, slots=True)
class _Job:
    """A request on its way to an answer, with the version under which its first token was asked for."""

    request: GenerationRequest
    asked: RequestOptions
    ticket: Ticket
    lane: Lane | None = None
    started: int | None = None
    aborted: bool = False

    def answer(self, generation: Generation, version: int) -> Started:
        """What the caller gets. A request that never started counts from the present version."""
        return Started(generation, version if self.started is None else self.started)

    def start(self, version: int) -> None:
        """Its first token is asked for."""
        self.started = version
        if self.asked.on_start is not None:
            self.asked.on_start(version)

    def again(self, kept: Partial) -> None:
        """Send it again with these tokens; without tokens it starts anew."""
        self.request = replace(self.request, id=f"{self.request.id}'", prefix=kept)  # the old id may still be known
        if not kept:
            self.started = None

    def ended(self, had: Partial) -> Generation:
        """What there is of it, once it was aborted."""
        return Generation(self.request.id, had, Ending.ABORTED)


class InferenceProxy:
    """All engines as one. See the module's docstring for the guarantees."""

    def __init__(
        self,
        engines: Sequence[Engine],
        slots: int,
        replacement_seconds: float = 0.0,
        routing: Routing = "least-work",
    ) -> None:
        """`engines` are those that have started; more may `join`. At most `slots` requests run on one of them."""
        self._slots = slots
        self._replacement_seconds = replacement_seconds
        self._queue = SlotQueue(routing, replacement_seconds)
        for place, engine in enumerate(engines):
            self._queue.put(place, Lane(engine, slots))
        self._jobs: dict[str, _Job] = {}
        self._taken: _Taken | None = None
        self._changing = asyncio.Lock()  # an update of all engines, or one that joins
        self._closing: set[asyncio.Task[None]] = set()
        self.version = -1  # the newest that serves: what is started now is started under; if none serves, as before
        self.on_change: Callable[[], None] = lambda: None  # called when there is a newer version, or another engine
        self.restarted = 0  # requests that started again: aborted by an update, or their engine failed
        self.taken_over = 0  # requests that went on elsewhere with the tokens they had
        self.update_seconds = 0.0

    @property
    def running(self) -> int:
        """Requests at the engines, or waiting for them."""
        return len(self._jobs)

    @property
    def capacity(self) -> int:
        """Requests that the live engines can run; while none lives, those of one engine: then requests keep coming."""
        return self._slots * max(1, len(self._queue.live))

    @property
    def engines(self) -> Mapping[int, Engine]:
        """The live engines, by their place."""
        return {place: lane.engine for place, lane in self._queue.places.items() if lane.failure is None}

    @property
    def failed(self) -> dict[int, str]:
        """Why engines are out, by their place; engines that died without a request included."""
        found = ((place, lane.failure or _death(lane.engine)) for place, lane in self._queue.places.items())
        return {place: str(failure) for place, failure in found if failure}

    async def generate(self, request: GenerationRequest, asked: RequestOptions | None = None) -> Started:
        """Sample one response, wherever there is room.

        Raises:
            EngineFailed: no engine is left, and none has joined in time.
        """
        asked = asked or RequestOptions()
        job = _Job(request, asked, self._queue.ticket(asked.priority, asked.group))
        self._jobs[request.id] = job
        try:
            while True:
                job.lane = lane = await self._queue.take(job.ticket)
                if lane is None:
                    return job.answer(job.ended(job.request.prefix), self.version)
                try:
                    generation = await self._on(lane, job)
                finally:
                    job.lane = None
                    self._queue.release(lane, job.ticket)
                if generation is not None:
                    return job.answer(generation, self.version)
        finally:
            del self._jobs[request.id]

    async def abort(self, ids: Collection[str]) -> None:
        """End these requests now: their `generate` returns the tokens they have; unknown ids are ignored."""
        running: defaultdict[Lane, list[str]] = defaultdict(list)
        for job in filter(None, map(self._jobs.get, ids)):
            job.aborted = True
            if job.lane is None:
                self._queue.withdraw(job.ticket)
            else:
                running[job.lane].append(job.request.id)
        await asyncio.gather(*(self._abort(lane, ids) for lane, ids in running.items()))

    async def update(self, version: int, weights: Any, probe: Probe, in_flight: InFlight) -> None:
        """Take every live engine to `version`, and later those that join; `weights` are as the engines take them.

        Raises:
            EngineFailed: no engine survived it, and none is to be replaced.
        """
        async with self._changing:
            taken = _Taken(version, weights, probe, in_flight)
            await asyncio.gather(*(self._fetch(lane, taken) for lane in self._queue.live))
            began = asyncio.get_running_loop().time()
            self._taken = taken
            await asyncio.gather(*(self._renew(lane, taken) for lane in self._queue.live))
            self._note_version(version)
            self.update_seconds += asyncio.get_running_loop().time() - began
        if not self._queue.live and not self._replacement_seconds:
            raise self._queue.none_left()

    async def join(self, place: int, engine: Engine) -> None:
        """Put a started engine in its place; one that lived there hands its requests over.

        Raises:
            EngineFailed: the new engine did not take the present weights; the old one keeps its place.
        """
        lane = Lane(engine, self._slots)
        if self._taken is not None:
            await engine.fetch(self._taken.version, self._taken.weights)  # the others' updates need not wait for it
        async with self._changing:
            if self._taken is not None:
                await self._bring(lane, self._taken)
            if lane.failure is not None:
                raise lane.failure
            old = self._queue.put(place, lane)
            self.on_change()
        if old is not None:
            self._fail(old, EngineFailed("another engine took its place"))

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[Engine]:
        """One engine of several, out of service for the length of the block; then it joins again, if it lives.

        Raises:
            EngineFailed: there are not two that live, or it died in the block.
        """
        place, engine = await self._lend()
        try:
            yield engine
        finally:
            try:
                engine.check()
                if place not in self.engines:  # else another has taken its place
                    await self.join(place, engine)
            except EngineFailed as error:  # somebody has to start it again
                self._queue.places.setdefault(place, Lane(engine, self._slots, failure=EngineFailed(str(error))))
                raise

    async def _lend(self) -> tuple[int, Engine]:
        async with self._changing:
            live = {place: lane for place, lane in self._queue.places.items() if lane.failure is None}
            if len(live) < 2:
                raise EngineFailed("no engine can be lent: there are not two that live")
            place, lane = min(live.items(), key=lambda item: item[1].taken)
            lane.failure = EngineFailed("the engine is lent")
            self._queue.remove(lane)
            await self._hand_over(lane)
        return place, lane.engine

    def _note_version(self, version: int) -> None:
        if version != self.version:
            self.version = version
            self.on_change()

    async def _on(self, lane: Lane, job: _Job) -> Generation | None:
        """One try on one engine; None if the request has to go on, or start again, elsewhere."""
        await lane.serves.wait()  # what arrives in an update is started under the version it brings
        if job.aborted:
            return job.ended(job.request.prefix)
        if lane.failure is not None:
            return None
        engine = lane.engine
        assert self._taken is not None, "an engine serves once it has weights"
        if job.request.prefix and job.started != engine.version and self._taken.in_flight == "restart":
            self._again(job, Partial())
        if job.started is None:  # counted from the request, not its first token: it may wait through an update
            job.start(engine.version)
        clock, had = asyncio.get_running_loop().time, len(job.request.prefix)
        began = clock()
        try:
            generation = await engine.generate(job.request)
        except EngineFailed as error:
            return self._died(lane, job, error)
        self._queue.observed(lane, len(generation.made) - had, clock() - began)
        if generation.ending is not Ending.ABORTED or job.aborted:
            return generation
        handed_over = lane.failure is not None  # else an update aborted it
        self._again(job, generation.made if handed_over else Partial())
        return None

    def _died(self, lane: Lane, job: _Job, error: EngineFailed) -> Generation | None:
        told = lane.engine.progress({job.request.id: 0}).get(job.request.id, Partial())
        had = max(told, job.request.prefix, key=len)
        self._fail(lane, error)
        if job.aborted:
            return job.ended(had)
        self._again(job, had)
        return None

    def _again(self, job: _Job, kept: Partial) -> None:
        if kept:
            self.taken_over += 1
        else:
            self.restarted += 1
        job.again(kept)

    async def _abort(self, lane: Lane, ids: list[str]) -> None:
        try:
            await lane.engine.abort(ids)
        except EngineFailed as error:
            self._fail(lane, error)

    async def _fetch(self, lane: Lane, to: _Taken) -> None:
        """While it generates."""
        try:
            await lane.engine.fetch(to.version, to.weights)
        except EngineFailed as error:
            self._fail(lane, error)

    async def _renew(self, lane: Lane, to: _Taken) -> None:
        await self._bring(lane, to)
        if lane.failure is None:
            self._note_version(to.version)
        self._queue.changed(lane)

    async def _bring(self, lane: Lane, to: _Taken) -> None:
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

    def _fail(self, lane: Lane, error: EngineFailed) -> None:
        """Take the engine out and end it: it may still be running, under wrong weights or for nobody."""
        if lane.failure is None:
            lane.failure = EngineFailed(str(error))  # without what it went through: the engine would outlive itself
            closing = asyncio.create_task(self._close(lane))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            self._queue.changed(lane)

    async def _hand_over(self, lane: Lane) -> None:
        with suppress(EngineFailed):  # it is dead, and its requests know it
            await lane.engine.abort([job.request.id for job in self._jobs.values() if job.lane is lane])

    async def _close(self, lane: Lane) -> None:
        await self._hand_over(lane)
        await lane.engine.close()


def _death(engine: Engine) -> EngineFailed | None:
    try:
        engine.check()
    except EngineFailed as error:
        return error
    return None
