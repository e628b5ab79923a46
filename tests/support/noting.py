"""An engine that records its calls, and functions that send requests to a proxy with such engines, on the virtual
clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from rollflow.storage.errors import EngineFailed
from rollflow.storage.model_input import ModelInput
from rollflow.tasks.engines.base import GenerationRequest, InFlight
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.rollout.proxy import InferenceProxy, RequestOptions, VersionedGeneration, WeightsProbe
from rollflow.tasks.runtime.clock import run_virtual

CONFIG = TimedEngineConfig(
    max_concurrent_requests=4, max_new_tokens=40, median_tokens=400, seconds_per_token=0.1, update_seconds=0.5
)
NO_PROBE = WeightsProbe((), (), 0.1)
WEIGHTS = Path("weights")


class Noting(TimedEngine):
    """A timed engine that records its calls, and answers the probe with given values."""

    def __init__(self, said: Sequence[float] | None = None) -> None:
        super().__init__(CONFIG)
        self.said, self.calls, self.closed = said, list[tuple[Any, ...]](), 0
        self.fails: set[str] = set()

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] in self.fails:
            raise EngineFailed(f"no {call[0]}")

    async def abort(self, ids: Sequence[str]) -> None:
        self._note("abort", *ids)
        await super().abort(ids)

    async def fetch(self, version: int, weights: Any) -> None:
        self._note("fetch", version, weights)

    async def suspend(self, in_flight: InFlight) -> None:
        self._note("suspend", in_flight)
        await super().suspend(in_flight)

    async def update(self, version: int, weights: Any) -> None:
        self._note("update", version, weights)
        await super().update(version, weights)

    async def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...] | None:
        self._note("logprobs", *tokens)
        return None if self.said is None else tuple(self.said)

    async def resume(self) -> None:
        self._note("resume")
        await super().resume()

    async def close(self) -> None:
        self.closed += 1
        await super().close()


def request(name: str, seed: int = 1) -> GenerationRequest:
    """Build a request for 40 tokens, which take four seconds."""
    return GenerationRequest(name, ModelInput.of((1, 2)), 40, seed=seed)


def asking(proxy: InferenceProxy, name: str, asked: RequestOptions | None = None) -> asyncio.Task[VersionedGeneration]:
    """Start a request."""
    return asyncio.create_task(proxy.generate(request(name), asked))


def virtual(main: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine on the virtual clock, for at most 1000 seconds."""

    async def bounded() -> None:
        async with asyncio.timeout(1000):
            await main()

    run_virtual(bounded())
