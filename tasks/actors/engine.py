"""Runs an inference engine in a Ray actor, which the client `engine_client.RayEngine` calls."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path

from rollflow.storage.errors import EngineFailed, RollflowError
from rollflow.tasks.actors.lease import Lease
from rollflow.tasks.actors.wire import (
    Collected,
    PackedRequests,
    pack_generations,
    pack_partials,
    unpack_requests,
)
from rollflow.tasks.engines.base import Engine, Generation, GenerationRequest, InFlight, TokenSpan, WeightsSource
from rollflow.tasks.engines.meter import EngineMeter, EngineStats
from rollflow.tasks.runtime.actor_warnings import warnings_of
from rollflow.tasks.runtime.cpu import CpuClock

COALESCE_SECONDS = 0.003  # seconds that a finished response waits, so that several responses are returned in one call
PROGRESS_SECONDS = 0.25  # seconds between two reports of newly generated tokens to the client


class OwnershipLost(EngineFailed):
    """Raised at a client of an engine actor after another client has taken over the actor."""


class EngineActor:
    """Ray actor that owns an inference engine, runs requests, and keeps results until the client collects them."""

    def __init__(self, build: Callable[[], Engine], lease: Lease | None = None) -> None:
        """Create the Ray actor; `start` creates the inference engine.

        Args:
            build: this function creates the engine on the actor's node.
            lease: the lease with which a detached actor ends itself, if any.
        """
        if lease:
            lease.hold("engine")
        self._build = build
        self._built: Engine | None = None
        self._source: WeightsSource | None = None
        # lock during a fetch and during an update of weights: a fetch may delete weights that an update is reading
        self._loading = asyncio.Lock()
        self._meter = EngineMeter()
        self._cpu = CpuClock("engine", "engine core")
        self._started: asyncio.Task[None] | None = None
        self._owner: str | None = None
        self._have: dict[str, int] = {}  # id of a running request -> number of tokens that the client has received
        self._reported = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._finished: list[Generation] = []
        self._errors: list[tuple[str, Exception]] = []
        self._news = asyncio.Event()

    async def start(self) -> None:
        """Start the engine, or wait for an earlier `start`.

        A dead engine is replaced by a new one, without weights and without a client. The actor's process stays alive,
        because imports and compilation take most of the time of a start.
        """
        if self._started is None or self._is_dead():
            self._started = asyncio.create_task(self._start())
        await asyncio.shield(self._started)

    def _is_dead(self) -> bool:
        if self._started is None or not self._started.done():
            return False
        try:
            self._engine.check()
        except EngineFailed:
            return True
        return False

    async def _start(self) -> None:
        if self._built is not None:
            self._owner = None  # the client of the dead engine must not use the new engine
            await self._built.close()
        self._built = await asyncio.to_thread(self._build)
        await self._built.start()

    @property
    def _engine(self) -> Engine:
        if self._built is None:
            raise EngineFailed("this engine cannot be used, because it was never started")
        return self._built

    async def attach(self, owner: str) -> None:
        """Make `owner` the only client, and abort the requests of the previous client."""
        self._owner = owner
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._finished.clear()
        self._errors.clear()
        self._have.clear()

    async def submit(self, owner: str, packed: PackedRequests) -> None:
        """Start generating the responses to these requests; `collect` returns the results."""
        self._check_owner(owner)
        for request in unpack_requests(packed):
            task = asyncio.create_task(self._run(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, request: GenerationRequest) -> None:
        self._meter.change(running=1)
        self._have[request.id] = 0
        tokens = 0
        try:
            generation = await self._engine.generate(request)
            tokens = len(generation.made) - len(request.prefix)
            self._meter.count_prefill(request.prompt.length + len(request.prefix), generation.cached)
            self._meter.count_drafts(generation.drafts)
            self._finished.append(generation)
            del self._have[request.id]
        except Exception as error:  # noqa: BLE001 - the error of a request is raised at its caller
            self._errors.append((request.id, error))
        finally:  # this block also runs if a new client cancels the request
            self._meter.change(running=-1, tokens=tokens)
            self._news.set()

    async def collect(self, owner: str) -> Collected:
        """Return the results of requests since the last call of `collect`, and the new tokens of running requests.

        `collect` waits until a request ends or `PROGRESS_SECONDS` have passed.
        """
        try:
            async with asyncio.timeout(PROGRESS_SECONDS):
                await self._news.wait()
            await asyncio.sleep(COALESCE_SECONDS)
        except TimeoutError:
            pass
        self._check_owner(owner)
        self._news.clear()
        finished, self._finished = self._finished, []
        errors, self._errors = self._errors, []
        # After a failed request, the new tokens of all requests are returned at once, because the engine may be dead.
        report = self._collect_progress(now=bool(errors))
        for id, _ in errors:
            del self._have[id]
        return pack_generations(finished), errors, pack_partials(report)

    def _collect_progress(self, *, now: bool) -> dict[str, TokenSpan]:
        """Return the new tokens of running requests, at most once in `PROGRESS_SECONDS` unless `now` is True."""
        if not now and asyncio.get_running_loop().time() - self._reported < PROGRESS_SECONDS:
            return {}
        self._reported = asyncio.get_running_loop().time()
        new = {id: partial for id, partial in self._engine.progress(self._have).items() if partial}
        for id, partial in new.items():
            self._have[id] += len(partial)
        return new

    async def abort(self, owner: str, ids: list[str]) -> None:
        self._check_owner(owner)
        await self._engine.abort(ids)

    async def suspend(self, owner: str, in_flight: InFlight) -> None:
        self._check_owner(owner)
        await self._engine.suspend(in_flight)
        self._meter.change(suspended=True)

    async def fetch(self, version: int, source: WeightsSource) -> None:
        """Fetch the weights of a policy version from storage to this node."""
        async with self._loading:
            await asyncio.to_thread(self._fetch_weights, version, source)

    async def update(self, owner: str, version: int, source: WeightsSource) -> None:
        async with self._loading:
            folder = await asyncio.to_thread(self._fetch_weights, version, source)
            self._check_owner(owner)
            await self._engine.update(version, folder)

    def _fetch_weights(self, version: int, source: WeightsSource) -> Path:
        if self._source != source:  # keep an equal source, because it has already fetched weights
            self._source = source
        try:
            return self._source.weights(version)
        # The weights could not be fetched here, but engines on other nodes may still have them.
        except (RollflowError, OSError) as error:
            raise EngineFailed(
                f"the weights of version {version} cannot be fetched to the node of this engine: {error}"
            ) from error

    async def resume(self, owner: str) -> None:
        self._check_owner(owner)
        self._meter.change(suspended=False)
        await self._engine.resume()

    async def logprobs(self, owner: str, tokens: list[int]) -> tuple[float, ...] | None:
        self._check_owner(owner)
        return await self._engine.logprobs(tokens)

    async def stats(self) -> EngineStats:
        self._engine.check()
        warned = tuple(warnings_of("engine").read())
        return dataclasses.replace(self._meter.read(), costs=tuple(self._cpu.read()), warned=warned)

    async def health(self) -> None:
        """Raise `EngineFailed` if the engine is dead, even if no request is running."""
        if self._started is not None and self._started.done():
            self._engine.check()

    async def close(self, owner: str) -> None:
        self._check_owner(owner)
        await self._engine.close()

    def _check_owner(self, owner: str) -> None:
        if owner != self._owner:
            raise OwnershipLost(
                "another client (RayEngine) has taken over this engine, so this client can no longer use it"
            )
