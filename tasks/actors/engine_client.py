"""The `Engine` that stands for one in a Ray actor.

One actor call per request would cost more than generating a short answer, so calls are coalesced:

    generate() ─┐                      ┌─ task per request ─ engine
    generate() ─┼─ submit([...]) ────► │                       │
    generate() ─┘   one per loop tick  └─ finished ◄───────────┘
        ▲                                   │
        └──── collect() ◄───────────────────┘   long poll: what finished within a few milliseconds, and
                                                now and then the new tokens of what still runs

Guarantees: every wait has a deadline; when the actor dies, stays silent past a deadline or makes no token for
as long, every call raises `EngineFailed`, also the ones already waiting, and `progress` still tells the tokens
that had arrived by then. A request's own error reaches its caller alone. An owner that lost the actor to another
one can do nothing to it any more. A cancelled caller's request ends, and its id may be used again at once: what is
still told of it reaches nobody.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import RayError

from rollflow.storage.errors import EngineFailed
from rollflow.storage.token_arrays import Float32s, Int32s
from rollflow.tasks.actors.engine import EngineActor, TakenOver
from rollflow.tasks.actors.wire import (
    Collected,
    pack_requests,
    unpack_generations,
    unpack_partials,
)
from rollflow.tasks.engines import build_engine
from rollflow.tasks.engines.base import Generation, GenerationRequest, InFlight, Partial, WeightsSource
from rollflow.tasks.engines.config import EngineConfig
from rollflow.tasks.engines.meter import EngineStats

START_SECONDS = 900.0
SILENT_SECONDS = 60.0  # for a call, and for the next token; longer than an engine's own deadline: its message arrives
FETCH_SECONDS = 1000.0  # and as long as storage is waited for; longer than the node waits for another who fetches
UPDATE_SECONDS = 150.0
CLOSE_SECONDS = 10.0


class RayEngine:
    """The `Engine` in an `EngineActor`. See `base.Engine` for the methods' contract.

    One at a time: a new one, in the place of a process that died, takes the actor over when it first uses it.
    """

    def __init__(
        self, actor: Any, *, name: str = "engine", silent_seconds: float = SILENT_SECONDS, keep_actor: bool = False
    ) -> None:
        """An actor that is silent, or makes no token while requests run, for `silent_seconds` counts as dead.

        `keep_actor`: somebody else cares for the actor. `close` ends the engine in it, and kills only an actor that
        does not answer.
        """
        self._actor = actor
        self._keep_actor = keep_actor
        self._answers = True  # the actor does, whatever became of the engine in it
        self._name = name
        self._silent = silent_seconds
        self._moved = 0.0  # loop time of the last token, or of the last moment with nothing to do
        self._suspended = False
        self._version = -1
        self._owner = secrets.token_hex(8)
        self._attached: asyncio.Future[Any] | None = None
        self._failure: EngineFailed | None = None
        self._numbers = itertools.count()
        self._outbox: dict[str, GenerationRequest] = {}  # by the number that each is sent under
        # By those numbers, too. A future holds what its error went through: nothing that lasts may hold a future.
        self._waiting: dict[str, asyncio.Future[Generation]] = {}
        self._sent: dict[str, Call] = {}
        self._calls: dict[str, Call] = {}  # the same by the callers' ids; also those that waited at the failure
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
        return cls(remote.remote(functools.partial(build_engine, config, policy_folder, dtype=dtype)), name=name)

    @property
    def version(self) -> int:
        return self._version

    @property
    def actor(self) -> Any:
        return self._actor

    async def start(self) -> None:
        await self._attach(START_SECONDS)
        await self._ask(START_SECONDS, "start")

    async def generate(self, request: GenerationRequest) -> Generation:
        self.check()
        if request.id in self._calls:
            raise ValueError(f"{request.id} is already being generated")
        Int32s.of(request.prompt)  # what is no prompt is an error here, at its caller alone
        loop = asyncio.get_running_loop()
        if not self._outbox:
            loop.call_soon(self._flush)
        if not self._waiting:
            self._moved = loop.time()
        number = f"{request.id}#{next(self._numbers)}"
        self._outbox[number] = replace(request, id=number)
        self._calls[request.id] = self._sent[number] = call = Call(number)
        self._waiting[number] = loop.create_future()
        try:
            made = await self._waiting[number]
            return Generation(request.id, made.made, made.ending, made.cached)
        except asyncio.CancelledError:
            self._disown(call)
            raise
        finally:
            del self._waiting[number], self._sent[number]
            if self._failure is None:
                del self._calls[request.id]

    async def abort(self, ids: Sequence[str]) -> None:
        await self._submitted()  # an abort must not overtake its request
        if self._attached is None:
            self.check()  # and nothing runs
        else:
            await self._own(self._silent, "abort", [self._calls[id].number for id in ids if id in self._calls])

    async def suspend(self, in_flight: InFlight) -> None:
        await self._submitted()
        self._suspended = True
        await self._own(self._silent, "suspend", in_flight)

    async def fetch(self, version: int, weights: WeightsSource) -> None:
        await self._ask(FETCH_SECONDS + (weights.patience or 0.0), "fetch", version, weights)

    async def update(self, version: int, weights: WeightsSource) -> None:
        await self.fetch(version, weights)  # nothing, unless it joins while a version comes: it may take longer
        await self._own(UPDATE_SECONDS, "update", version, weights)
        self._version = version

    async def resume(self) -> None:
        await self._own(self._silent, "resume")
        self._suspended = False
        self._moved = asyncio.get_running_loop().time()

    async def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...] | None:
        answer: tuple[float, ...] | None = await self._own(self._silent, "logprobs", list(tokens))
        return answer

    async def stats(self) -> EngineStats:
        answer: EngineStats = await self._ask(self._silent, "stats")
        return answer

    def check(self) -> None:
        if self._failure is not None:
            raise EngineFailed(str(self._failure))

    def progress(self, have: Mapping[str, int]) -> dict[str, Partial]:
        return {id: self._calls[id].arrived.partial().after(have[id]) for id in have if id in self._calls}

    async def close(self) -> None:
        if self._attached is not None and self._failure is None:
            with suppress(EngineFailed):  # killed below all the same; its processes watch for that
                await self._own(CLOSE_SECONDS, "close")
        failure = self._fail(EngineFailed(f"{self._name} is closed"))
        if self._attached is None or isinstance(failure, TakenOver):
            return  # it is not its own to end
        if not (self._keep_actor and self._answers):
            ray.kill(self._actor)

    async def owns(self) -> bool:
        """Whether the engine in the actor is the one that this has brought to its version."""
        try:
            await self._own(self._silent, "abort", [])
        except EngineFailed:
            return False
        return True

    def _flush(self) -> None:
        if self._outbox and self._failure is None:
            batch, self._outbox = self._outbox, {}
            task = asyncio.create_task(self._submit(list(batch.values())))
            self._submits.add(task)
            task.add_done_callback(self._submits.discard)
            for number in batch:
                self._sent[number].submit = task

    async def _submitted(self) -> None:
        """Return when the actor has what was asked for up to now."""
        self._flush()
        if self._submits:
            await asyncio.wait(self._submits)  # `gather` would cancel them with its caller

    async def _submit(self, batch: list[GenerationRequest]) -> None:
        try:
            await self._own(self._silent, "submit", pack_requests(batch))
        except EngineFailed:
            return  # `_ask` has told every waiting call
        except Exception as error:  # noqa: BLE001 - whatever it is: who waits must not wait for ever
            self._fail(EngineFailed(f"{self._name}: submit: {error!r}"))
            return
        if self._collector is None or self._collector.done():
            self._collector = asyncio.create_task(self._collect())

    async def _collect(self) -> None:
        """Hand out what ends, until nobody waits."""
        try:
            while self._waiting:
                self._check_moving(self._handed_out(await self._own(self._silent, "collect")))
        except EngineFailed:
            return  # `_ask` has told every waiting call
        except Exception as error:  # noqa: BLE001 - as in `_submit`
            self._fail(EngineFailed(f"{self._name}: collect: {error!r}"))

    def _handed_out(self, collected: Collected) -> bool:
        """Hand it out; false if there was nothing."""
        packed, errors, report = collected
        progress = unpack_partials(report)
        for number, new in progress.items():
            if number in self._sent:  # else its caller was cancelled
                self._sent[number].arrived.add(new)
        finished = unpack_generations(packed)
        for generation in finished:
            self._settle(generation.id, generation)
        for number, error in errors:
            self._settle(number, error)
        return bool(progress or finished or errors)

    def _check_moving(self, moved: bool) -> None:
        now = asyncio.get_running_loop().time()
        if moved or self._suspended:
            self._moved = now
        elif now - self._moved > self._silent:
            raise self._fail(EngineFailed(f"{self._name} made no token for {self._silent:g} s"))

    def _settle(self, number: str, outcome: Generation | Exception) -> None:
        if isinstance(outcome, EngineFailed):
            self._fail(outcome)
        future = self._waiting.get(number)
        if future is None or future.done():
            return  # its caller was cancelled
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _disown(self, call: Call) -> None:
        """A cancelled caller's request must not go on taking a slot."""
        if self._outbox.pop(call.number, None) is None and call.submit is not None:
            call.submit.add_done_callback(lambda _: self._abandon(call.number))  # an abort must not overtake it

    def _abandon(self, number: str) -> None:
        if self._failure is None:
            self._actor.abort.remote(self._owner, [number])

    async def _own(self, seconds: float, method: str, *arguments: Any) -> Any:
        """Ask for what only the owner may."""
        await self._attach(seconds)
        return await self._ask(seconds, method, self._owner, *arguments)

    async def _attach(self, seconds: float) -> None:
        if self._attached is None:
            self._attached = asyncio.ensure_future(self._ask(seconds, "attach", self._owner))
        await asyncio.shield(self._attached)

    async def _ask(self, seconds: float, method: str, *arguments: Any) -> Any:
        self.check()
        try:
            async with asyncio.timeout(seconds):
                return await getattr(self._actor, method).remote(*arguments)
        except TimeoutError as error:
            self._answers = False
            raise self._fail(EngineFailed(f"{self._name} did not answer {method} within {seconds:.0f} s")) from error
        except EngineFailed as error:
            kind = TakenOver if isinstance(error, TakenOver) else EngineFailed
            raise self._fail(kind(f"{self._name}: {method}: {_cause(error)}")) from error
        except RayError as error:
            if isinstance(error, ray.exceptions.RayTaskError):
                raise  # the method's own error, and not a dead actor
            self._answers = False
            raise self._fail(EngineFailed(f"{self._name}'s actor died: {error}")) from error

    def _fail(self, failure: EngineFailed) -> EngineFailed:
        """The first failure is the one everybody hears."""
        self._failure = self._failure or failure
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EngineFailed(str(self._failure)))
        return type(self._failure)(str(self._failure))  # what is raised holds the frames that it went through


@dataclass(eq=False, slots=True)
class Call:
    """A request whose caller waits, or waited at the failure.

    `number`: what the actor knows it by. A caller's id may come again while the first one ends.
    """

    number: str
    arrived: Arrived = field(default_factory=lambda: Arrived())
    submit: asyncio.Task[None] | None = None  # it is sent in


class Arrived:
    """The tokens of a request that have come so far: three buffers that grow, however often something comes."""

    __slots__ = ("_logprobs", "_tokens", "_versions")

    def __init__(self) -> None:
        self._tokens, self._logprobs, self._versions = bytearray(), bytearray(), bytearray()

    def add(self, new: Partial) -> None:
        """Take what came."""
        self._tokens += new.tokens.data
        self._logprobs += new.logprobs.data
        self._versions += new.versions.data

    def partial(self) -> Partial:
        """All of them."""
        return Partial(Int32s(bytes(self._tokens)), Float32s(bytes(self._logprobs)), Int32s(bytes(self._versions)))


def _cause(error: EngineFailed) -> str:
    """Ray's copy of the error prints a whole traceback; keep the message."""
    return str(getattr(error, "cause", error))
