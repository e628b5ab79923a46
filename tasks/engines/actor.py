"""An engine in a Ray actor, and the `Engine` that stands for it elsewhere.

One actor call per request would cost more than generating a short answer, so calls are coalesced:

    generate() ─┐                      ┌─ task per request ─ engine
    generate() ─┼─ submit([...]) ────► │                       │
    generate() ─┘   one per loop tick  └─ finished ◄───────────┘
        ▲                                   │
        └──── collect() ◄───────────────────┘   long poll: what finished within a few milliseconds

Guarantees: every wait has a deadline; when the actor dies, or stays silent past a deadline, every call raises
`EngineFailed`, also the ones already waiting. A request's own error reaches its caller alone.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import RayError

from rollflow.storage.errors import EngineFailed
from rollflow.tasks.engines import build_engine
from rollflow.tasks.engines.base import Engine, Generation, GenerationRequest, InFlight
from rollflow.tasks.engines.wire import (
    PackedGenerations,
    PackedRequests,
    pack_generations,
    pack_requests,
    unpack_generations,
    unpack_requests,
)
from rollflow.tasks.settings import EngineConfig

COALESCE_SECONDS = 0.003  # how long a finished generation waits for company
POLL_SECONDS = 5.0  # longest wait of one `collect`
START_SECONDS = 900.0
CALL_SECONDS = 150.0  # longer than any engine's own deadline, so that its message arrives


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counted since the start: tokens of ended generations, and seconds with a request running and not suspended."""

    running: int
    tokens: int
    busy_seconds: float


class Meter:
    """Adds up `EngineStats`; told of every change."""

    def __init__(self) -> None:
        self._running = 0
        self._tokens = 0
        self._busy = 0.0
        self._suspended = False
        self._since = time.monotonic()

    def change(self, running: int = 0, tokens: int = 0, suspended: bool | None = None) -> None:
        now = time.monotonic()
        if self._running > 0 and not self._suspended:
            self._busy += now - self._since
        self._since = now
        self._running += running
        self._tokens += tokens
        self._suspended = self._suspended if suspended is None else suspended

    def read(self) -> EngineStats:
        self.change()
        return EngineStats(self._running, self._tokens, self._busy)


class EngineActor:
    """Lives in the actor's process: owns the engine, runs its requests, keeps what finished until collected."""

    def __init__(
        self,
        config: EngineConfig,
        policy_folder: Path | None,
        dtype: Literal["float32", "bfloat16"] = "float32",
    ) -> None:
        self._engine: Engine = build_engine(config, policy_folder, dtype=dtype)
        self._meter = Meter()
        self._owner: str | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._finished: list[Generation] = []
        self._errors: list[tuple[str, Exception]] = []
        self._news = asyncio.Event()

    async def start(self) -> None:
        await self._engine.start()

    async def attach(self, owner: str) -> None:
        """Serve this owner from now on; what an earlier one left running is aborted and forgotten."""
        self._owner = owner
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._finished.clear()
        self._errors.clear()

    async def submit(self, owner: str, packed: PackedRequests) -> None:
        """Start these requests; what becomes of them comes through `collect`."""
        self._check_owner(owner)
        for request in unpack_requests(packed):
            task = asyncio.create_task(self._run(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, request: GenerationRequest) -> None:
        self._meter.change(running=1)
        tokens = 0
        try:
            generation = await self._engine.generate(request)
            tokens = len(generation.tokens)
            self._finished.append(generation)
        except Exception as error:  # noqa: BLE001 - a request's error is a value: it is raised at its caller
            self._errors.append((request.id, error))
        finally:  # also when a new owner cancels it
            self._meter.change(running=-1, tokens=tokens)
            self._news.set()

    async def collect(self, owner: str, seconds: float) -> tuple[PackedGenerations, list[tuple[str, Exception]]]:
        """What ended since the last call; waits up to `seconds` for the first."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
            await asyncio.sleep(COALESCE_SECONDS)
        except TimeoutError:
            pass
        self._check_owner(owner)
        self._news.clear()
        finished, self._finished = self._finished, []
        errors, self._errors = self._errors, []
        return pack_generations(finished), errors

    async def abort(self, ids: list[str]) -> None:
        await self._engine.abort(ids)

    async def suspend(self, in_flight: InFlight) -> None:
        await self._engine.suspend(in_flight)
        self._meter.change(suspended=True)

    async def update(self, version: int, weights: Path) -> None:
        await self._engine.update(version, weights)

    async def resume(self) -> None:
        self._meter.change(suspended=False)
        await self._engine.resume()

    async def logprobs(self, tokens: list[int]) -> tuple[float, ...] | None:
        return await self._engine.logprobs(tokens)

    async def stats(self) -> EngineStats:
        return self._meter.read()

    async def close(self) -> None:
        await self._engine.close()

    def _check_owner(self, owner: str) -> None:
        if owner != self._owner:
            raise EngineFailed("another RayEngine has taken this engine over")


class RayEngine:
    """The `Engine` in an `EngineActor`. See `base.Engine` for the methods' contract.

    One at a time: a new one, in the place of a process that died, takes the actor over with its first call.
    """

    def __init__(self, actor: Any, *, name: str = "engine") -> None:
        self._actor = actor
        self._name = name
        self._version = -1
        self._owner = secrets.token_hex(8)
        self._attached: asyncio.Future[Any] | None = None
        self._failure: EngineFailed | None = None
        self._outbox: list[GenerationRequest] = []
        self._waiting: dict[str, asyncio.Future[Generation]] = {}
        self._submits: set[asyncio.Task[None]] = set()
        self._collector: asyncio.Task[None] | None = None

    @classmethod
    def spawn(
        cls,
        config: EngineConfig,
        policy_folder: Path | None,
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
        name: str = "engine",
        **options: Any,
    ) -> RayEngine:
        """Create the actor (`options` are Ray's: num_cpus, num_gpus, name, ...); call `start` next."""
        remote = ray.remote(EngineActor).options(**{"max_restarts": 0, "num_cpus": 0, **options})
        return cls(remote.remote(config, policy_folder, dtype), name=name)

    @property
    def version(self) -> int:
        return self._version

    @property
    def actor(self) -> Any:
        return self._actor

    async def start(self) -> None:
        await self._ask(START_SECONDS, "start")

    async def generate(self, request: GenerationRequest) -> Generation:
        self._check_alive()
        if request.id in self._waiting:
            raise ValueError(f"{request.id} is already being generated")
        loop = asyncio.get_running_loop()
        if not self._outbox:
            loop.call_soon(self._flush)
        self._outbox.append(request)
        self._waiting[request.id] = loop.create_future()
        try:
            return await self._waiting[request.id]
        except asyncio.CancelledError:
            self._disown(request.id)
            raise
        finally:
            self._waiting.pop(request.id, None)

    async def abort(self, ids: Sequence[str]) -> None:
        self._flush()
        await asyncio.gather(*self._submits)  # an abort must not overtake its request
        await self._ask(CALL_SECONDS, "abort", list(ids))

    async def suspend(self, in_flight: InFlight) -> None:
        self._flush()
        await asyncio.gather(*self._submits)
        await self._ask(CALL_SECONDS, "suspend", in_flight)

    async def update(self, version: int, weights: Path) -> None:
        await self._ask(CALL_SECONDS, "update", version, weights)
        self._version = version

    async def resume(self) -> None:
        await self._ask(CALL_SECONDS, "resume")

    async def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...] | None:
        answer: tuple[float, ...] | None = await self._ask(CALL_SECONDS, "logprobs", list(tokens))
        return answer

    async def stats(self) -> EngineStats:
        answer: EngineStats = await self._ask(CALL_SECONDS, "stats")
        return answer

    async def close(self) -> None:
        if self._failure is None:
            with suppress(EngineFailed):  # killed below all the same; its processes watch for that
                await self._ask(CALL_SECONDS, "close")
        self._fail(EngineFailed(f"{self._name} is closed"))
        ray.kill(self._actor)

    def _flush(self) -> None:
        if self._outbox and self._failure is None:
            batch, self._outbox = self._outbox, []
            task = asyncio.create_task(self._submit(batch))
            self._submits.add(task)
            task.add_done_callback(self._submits.discard)

    async def _submit(self, batch: list[GenerationRequest]) -> None:
        try:
            await self._ask(CALL_SECONDS, "submit", self._owner, pack_requests(batch))
        except EngineFailed:
            return  # `_ask` has told every waiting call
        if self._collector is None or self._collector.done():
            self._collector = asyncio.create_task(self._collect())

    async def _collect(self) -> None:
        """Hand out what ends, until nobody waits."""
        try:
            while self._waiting:
                packed, errors = await self._ask(POLL_SECONDS + CALL_SECONDS, "collect", self._owner, POLL_SECONDS)
                for generation in unpack_generations(packed):
                    self._settle(generation.id, generation)
                for id, error in errors:
                    self._settle(id, error)
        except EngineFailed:
            return  # `_ask` has told every waiting call

    def _settle(self, id: str, outcome: Generation | Exception) -> None:
        if isinstance(outcome, EngineFailed):
            self._fail(outcome)
        future = self._waiting.get(id)
        if future is None or future.done():
            return  # its caller was cancelled
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _disown(self, id: str) -> None:
        """A cancelled caller's request must not go on taking a slot."""
        self._outbox = [request for request in self._outbox if request.id != id]
        if self._failure is None:
            self._actor.abort.remote([id])

    async def _ask(self, seconds: float, method: str, *arguments: Any) -> Any:
        self._check_alive()
        try:
            async with asyncio.timeout(seconds):
                if self._attached is None:
                    self._attached = asyncio.ensure_future(self._actor.attach.remote(self._owner))
                await asyncio.shield(self._attached)
                return await getattr(self._actor, method).remote(*arguments)
        except TimeoutError as error:
            raise self._fail(EngineFailed(f"{self._name} did not answer {method} within {seconds:.0f} s")) from error
        except EngineFailed as error:
            raise self._fail(EngineFailed(f"{self._name}: {method}: {_cause(error)}")) from error
        except RayError as error:
            if isinstance(error, ray.exceptions.RayTaskError):
                raise  # the method's own error, and not a dead actor
            raise self._fail(EngineFailed(f"{self._name}'s actor died: {error}")) from error

    def _fail(self, failure: EngineFailed) -> EngineFailed:
        """The first failure is the one everybody hears."""
        self._failure = self._failure or failure
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EngineFailed(str(self._failure)))
        return self._failure

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineFailed(str(self._failure))


def _cause(error: EngineFailed) -> str:
    """Ray's copy of the error prints a whole traceback; keep the message."""
    return str(getattr(error, "cause", error))
