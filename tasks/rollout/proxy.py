"""The inference proxy: routes requests to engines, takes them through weight updates, replaces the dead.

- A request goes to the live engine with the fewest requests, running or waiting; at most `slots` run on one engine.
- `update` suspends, updates, probes and resumes all engines at once. An engine whose log-probs differ from the
  learner's is closed before it makes a token.
- What a failed engine was running goes on at another one with the tokens it has, and counts as started when it was
  first started. Only where tokens of two versions may not mix (`in_flight = "restart"`) does it start again.
- A request that was aborted by an update (`in_flight = "restart"`) starts again under the new version.
- An engine that joins holds the present version, probed, before it gets a request. A failed one is closed at once.
- While no engine lives, requests wait `replacement_seconds` for one to join; then they fail with `EngineFailed`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollflow.storage.errors import EngineFailed
from rollflow.storage.records import Ending
from rollflow.tasks.engines.base import Engine, Generation, GenerationRequest, InFlight, Partial


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
    """The newest weights, as every engine has them, or takes them when it joins."""

    version: int
    weights: Path
    probe: Probe
    in_flight: InFlight


@dataclass(eq=False, slots=True)
class _Job:
    """A request on its way to an answer, and the version under which the first of its tokens was asked for."""

    request: GenerationRequest
    started: int | None = None

    def again(self, kept: Partial) -> None:
        """Another life, with these tokens; without any it is started anew."""
        # The old id may still be known.
        self.request = replace(self.request, id=f"{self.request.id}'", prefix=kept)
        if not kept:
            self.started = None


@dataclass(eq=False)
class _Lane:
    """One engine, its free slots, whether it serves (not before weights, not in an update), why it was taken out."""

    engine: Engine
    slots: asyncio.Semaphore
    jobs: set[_Job] = field(default_factory=set)  # that run on it or wait for its slots
    failure: EngineFailed | None = None
    serves: asyncio.Event = field(default_factory=asyncio.Event)


class InferenceProxy:
    """All engines as one. See the module's docstring for the guarantees."""

    def __init__(self, engines: Sequence[Engine], slots: int, replacement_seconds: float = 0.0) -> None:
        self._slots = slots
        self._replacement_seconds = replacement_seconds
        self._lanes = [_Lane(engine, asyncio.Semaphore(slots)) for engine in engines]
        self._taken: _Taken | None = None
        self._changing = asyncio.Lock()  # an update of all engines, or one that joins
        self._joined = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self.restarted = 0  # requests that started again: aborted by an update, or their engine failed
        self.taken_over = 0  # requests that went on elsewhere with the tokens they had
        self.update_seconds = 0.0

    @property
    def version(self) -> int:
        """The oldest version any live engine holds; while none lives, the newest that was to be taken."""
        taken = self._taken.version if self._taken else -1
        return min((lane.engine.version for lane in self._live), default=taken)

    @property
    def running(self) -> int:
        """Requests at the engines, or waiting for them."""
        return sum(len(lane.jobs) for lane in self._lanes)

    @property
    def failed(self) -> dict[int, str]:
        """Why engines are out, by their place; those that died without a request among them."""
        found = ((place, lane.failure or _death(lane.engine)) for place, lane in enumerate(self._lanes))
        return {place: str(failure) for place, failure in found if failure}

    async def generate(self, request: GenerationRequest) -> Started:
        """Sample one response, wherever there is room.

        Raises:
            EngineFailed: no engine is left, and none has joined in time.
        """
        job = _Job(request)
        while True:
            lane = await self._choose()
            lane.jobs.add(job)
            try:
                async with lane.slots:
                    generation = await self._on(lane, job)
            finally:
                lane.jobs.discard(job)
            if generation is not None and job.started is not None:
                return Started(generation, job.started)

    async def update(self, version: int, weights: Path, probe: Probe, in_flight: InFlight) -> None:
        """Take every live engine to `version`, and later those that join.

        Raises:
            EngineFailed: no engine survived it, and none is to be replaced.
        """
        async with self._changing:
            began = asyncio.get_running_loop().time()
            self._taken = taken = _Taken(version, weights, probe, in_flight)
            await asyncio.gather(*(self._bring(lane, taken) for lane in self._live))
            self.update_seconds += asyncio.get_running_loop().time() - began
        if not self._live and not self._replacement_seconds:
            raise self._none_left()

    async def join(self, place: int, engine: Engine) -> None:
        """Put a started engine in the place of another; one that lived hands its requests over.

        Raises:
            EngineFailed: the new engine did not take the present weights; the old one keeps its place.
        """
        lane = _Lane(engine, asyncio.Semaphore(self._slots))
        async with self._changing:
            if self._taken is not None:
                await self._bring(lane, self._taken)
            if lane.failure is not None:
                raise lane.failure
            old, self._lanes[place] = self._lanes[place], lane
            self._joined.set()
        self._fail(old, EngineFailed("another engine took its place"))

    @property
    def _live(self) -> list[_Lane]:
        return [lane for lane in self._lanes if lane.failure is None]

    async def _choose(self) -> _Lane:
        if not self._live:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._replacement_seconds):
                    while not self._live:
                        self._joined.clear()
                        await self._joined.wait()
        if not self._live:
            raise self._none_left()
        return min(self._live, key=lambda lane: len(lane.jobs))

    def _none_left(self) -> EngineFailed:
        return EngineFailed(f"no engine is left: {'; '.join(self.failed.values())}")

    async def _on(self, lane: _Lane, job: _Job) -> Generation | None:
        """One try on one engine; None if it has to go on, or start again, elsewhere."""
        await lane.serves.wait()  # what arrives in an update is started under the version it brings
        if lane.failure is not None:
            return None
        engine = lane.engine
        if job.request.prefix and job.started != engine.version and self._mixing_is_wrong:
            self._again(job, Partial())
        if job.started is None:  # counted from the request, not its first token: it may wait through an update
            job.started = engine.version
        try:
            generation = await engine.generate(job.request)
        except EngineFailed as error:
            had = engine.progress({job.request.id: 0}).get(job.request.id, Partial())
            self._again(job, max(had, job.request.prefix, key=len))
            self._fail(lane, error)
            return None
        if generation.ending is not Ending.ABORTED:
            return generation
        handed_over = lane.failure is not None  # else an update aborted it
        made = Partial(generation.tokens, generation.logprobs, generation.versions)
        self._again(job, made if handed_over else Partial())
        return None

    @property
    def _mixing_is_wrong(self) -> bool:
        return self._taken is not None and self._taken.in_flight == "restart"

    def _again(self, job: _Job, kept: Partial) -> None:
        if kept:
            self.taken_over += 1
        elif job.started is not None:
            self.restarted += 1
        job.again(kept)

    async def _bring(self, lane: _Lane, to: _Taken) -> None:
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

    def _fail(self, lane: _Lane, error: EngineFailed) -> None:
        """Take the engine out and end it: it may still run, under wrong weights or for nobody."""
        if lane.failure is None:
            lane.failure = error
            closing = asyncio.create_task(self._close(lane))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    @staticmethod
    async def _close(lane: _Lane) -> None:
        with suppress(EngineFailed):  # it is dead, and its requests know it
            await lane.engine.abort([job.request.id for job in lane.jobs])
        await lane.engine.close()


def _death(engine: Engine) -> EngineFailed | None:
    try:
        engine.check()
    except EngineFailed as error:
        return error
    return None
