"""The inference proxy: routes requests to engines, takes them through weight updates, fails over.

- A request goes to the live engine with the fewest requests, running or waiting; at most `slots` run on one engine.
- `update` suspends, updates, probes and resumes all engines at once. An engine whose log-probs differ from the
  learner's is closed before it makes a token, and its requests are taken elsewhere or fail with `EngineFailed`.
- A request that was aborted by an update (`in_flight = "restart"`) starts again under the new version.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollflow.storage.errors import EngineFailed
from rollflow.storage.records import Ending
from rollflow.tasks.engines.base import Engine, Generation, GenerationRequest, InFlight


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


@dataclass(eq=False)
class _Lane:
    """One engine, its free slots, whether it serves (not before weights, not in an update), why it was taken out."""

    engine: Engine
    slots: asyncio.Semaphore
    assigned: int = 0  # requests that run on it or wait for its slots
    failure: EngineFailed | None = None
    serves: asyncio.Event = field(default_factory=asyncio.Event)


class InferenceProxy:
    """All engines as one. See the module's docstring for the guarantees."""

    def __init__(self, engines: Sequence[Engine], slots: int) -> None:
        self._lanes = [_Lane(engine, asyncio.Semaphore(slots)) for engine in engines]
        self.restarted = 0  # requests that started again: aborted by an update, or their engine failed
        self.update_seconds = 0.0

    @property
    def version(self) -> int:
        """The oldest version any live engine holds."""
        return min((lane.engine.version for lane in self._live), default=-1)

    @property
    def running(self) -> int:
        """Requests at the engines, or waiting for them."""
        return sum(lane.assigned for lane in self._lanes)

    @property
    def failures(self) -> list[str]:
        """Why engines were taken out."""
        return [str(lane.failure) for lane in self._lanes if lane.failure]

    async def generate(self, request: GenerationRequest) -> Started:
        """Sample one response, wherever there is room.

        Raises:
            EngineFailed: no engine is left.
        """
        while True:
            lane = self._choose()
            lane.assigned += 1
            try:
                async with lane.slots:
                    started = await self._on(lane, request)
            finally:
                lane.assigned -= 1
            if started is not None:
                return started
            self.restarted += 1
            request = replace(request, id=f"{request.id}'")  # a new life; the old id may still be known

    async def update(self, version: int, weights: Path, probe: Probe, in_flight: InFlight) -> None:
        """Take every live engine to `version`; `EngineFailed` if none survives it."""
        started = asyncio.get_running_loop().time()
        await asyncio.gather(*(self._update(lane, version, weights, probe, in_flight) for lane in self._live))
        self.update_seconds += asyncio.get_running_loop().time() - started
        if not self._live:
            raise self._none_left()

    @property
    def _live(self) -> list[_Lane]:
        return [lane for lane in self._lanes if lane.failure is None]

    def _choose(self) -> _Lane:
        if not self._live:
            raise self._none_left()
        return min(self._live, key=lambda lane: lane.assigned)

    def _none_left(self) -> EngineFailed:
        return EngineFailed(f"no engine is left: {'; '.join(self.failures)}")

    async def _on(self, lane: _Lane, request: GenerationRequest) -> Started | None:
        """One try on one engine; None if it has to start again (aborted by an update, or the engine failed)."""
        await lane.serves.wait()  # what arrives in an update is started under the version it brings
        if lane.failure is not None:
            return None
        version = lane.engine.version
        try:
            generation = await lane.engine.generate(request)
        except EngineFailed as error:
            self._fail(lane, error)
            return None
        if lane.failure is not None or generation.ending is Ending.ABORTED:
            return None
        # Counted from the request, not its first token: it may have waited through an update.
        return Started(generation, version)

    async def _update(self, lane: _Lane, version: int, weights: Path, probe: Probe, in_flight: InFlight) -> None:
        engine = lane.engine
        lane.serves.clear()
        try:
            await engine.suspend(in_flight)
            await engine.update(version, weights)
            probe.check(await engine.logprobs(probe.tokens) if probe.expected else None)
            await engine.resume()
        except EngineFailed as error:
            self._fail(lane, error)
            await engine.close()
        finally:
            lane.serves.set()

    @staticmethod
    def _fail(lane: _Lane, error: EngineFailed) -> None:
        lane.failure = lane.failure or error
