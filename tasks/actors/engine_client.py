"""Implements the `Engine` contract with a client that calls an engine actor.

Several requests share an actor call, because a call for each request would cost more than generating a short answer.

    generate() ─┐                      ┌─ task per request ─ engine
    generate() ─┼─ submit([...]) ────► │                       │
    generate() ─┘   one per loop tick  └─ finished ◄───────────┘
        ▲                                   │
        └──── collect() ◄───────────────────┘   long poll: the generations that finished within a few
                                                milliseconds, and now and then new tokens of running ones

- Every wait has a deadline; after the death or silence of the actor, every call raises `EngineFailed`. `progress` still
  returns the tokens that were received.
- The error of one request is raised only at its caller.
- A client that lost the actor to another client can no longer change the actor's engine.
- The request of a cancelled caller is aborted, and its id may be reused at once.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import RayError

from rollflow.storage.errors import EngineFailed
from rollflow.storage.token_arrays import Float32s, Int32s
from rollflow.tasks.actors.engine import EngineActor, OwnershipLost
from rollflow.tasks.actors.wire import (
    Collected,
    pack_requests,
    unpack_generations,
    unpack_partials,
)
from rollflow.tasks.engines import build_engine
from rollflow.tasks.engines.base import Generation, GenerationRequest, InFlight, TokenSpan, WeightsSource
from rollflow.tasks.engines.config import EngineConfig
from rollflow.tasks.engines.meter import EngineStats

START_SECONDS = 900.0
# longest wait for an answer or a token, in seconds; the engine's own deadline is shorter, because its error is clearer
SILENT_SECONDS = 60.0
# longest time to fetch weights, in seconds, without the time in which storage does not answer
FETCH_SECONDS = 1000.0
UPDATE_SECONDS = 150.0
CLOSE_SECONDS = 10.0


class RayEngine:
    """Client of an inference engine that runs in a Ray actor (`EngineActor`).

    An engine actor serves one client at a time. The first call of a new client takes the actor over from the previous
    client.
    """

    def __init__(
        self, actor: Any, *, name: str = "engine", silent_seconds: float = SILENT_SECONDS, keep_actor: bool = False
    ) -> None:
        """Connect to an actor.

        Args:
            silent_seconds: an engine actor counts as dead after this many seconds without an answer or without a new
                token.
            keep_actor: if True, the caller restarts and ends the actor. With `keep_actor`, the method `close` closes
                only the engine, and kills the actor only if the actor does not answer.
        """
        self._actor = actor
        self._keep_actor = keep_actor
        self._answers = True  # False once the engine actor has died or missed a deadline
        self._name = name
        self._silent = silent_seconds
        self._moved = 0.0  # time, on the loop's clock, of the last new token or of the last moment without requests
        self._suspended = False
        self._version = -1
        self._owner = secrets.token_hex(8)
        self._attached: asyncio.Future[Any] | None = None
        self._failure: EngineFailed | None = None
        self._numbers = itertools.count()
        self._outbox: dict[str, GenerationRequest] = {}  # requests not yet sent to the actor, keyed by their number
        self._waiting: dict[str, PendingCall] = {}  # requests whose callers wait, keyed by number
        self._calls: dict[
            str, PendingCall
        ] = {}  # requests by the caller's id, also those that waited when the engine failed
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
        """Create an engine actor with Ray's `options`, such as `num_cpus`; the caller must then call `start`."""
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
            raise ValueError(f"request {request.id!r} is already running; give each request its own id")
        loop = asyncio.get_running_loop()
        if not self._outbox:
            loop.call_soon(self._flush)
        if not self._waiting:
            self._moved = loop.time()
        number = f"{request.id}#{next(self._numbers)}"
        self._outbox[number] = replace(request, id=number)
        self._calls[request.id] = self._waiting[number] = call = PendingCall(number, loop.create_future())
        try:
            return replace(await call.answer, id=request.id)
        except asyncio.CancelledError:
            self._drop_cancelled(call)
            raise
        finally:
            del self._waiting[number], call.answer  # the error of a future keeps stack frames in memory
            if self._failure is None:
                del self._calls[request.id]

    async def abort(self, ids: Sequence[str]) -> None:
        await self._wait_submitted()  # an abort must not reach the actor before the request that it aborts
        if self._attached is None:
            self.check()  # no request was ever sent
        else:
            await self._ask_as_owner(self._silent, "abort", [self._calls[id].number for id in ids if id in self._calls])

    async def suspend(self, in_flight: InFlight) -> None:
        await self._wait_submitted()
        self._suspended = True
        await self._ask_as_owner(self._silent, "suspend", in_flight)

    async def fetch(self, version: int, weights: WeightsSource) -> None:
        await self._ask(FETCH_SECONDS + (weights.patience or 0.0), "fetch", version, weights)

    async def update(self, version: int, weights: WeightsSource) -> None:
        await self.fetch(version, weights)  # an engine that has just joined the run may lack the weights
        await self._ask_as_owner(UPDATE_SECONDS, "update", version, weights)
        self._version = version

    async def resume(self) -> None:
        await self._ask_as_owner(self._silent, "resume")
        self._suspended = False
        self._moved = asyncio.get_running_loop().time()

    async def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...] | None:
        answer: tuple[float, ...] | None = await self._ask_as_owner(self._silent, "logprobs", list(tokens))
        return answer

    async def stats(self) -> EngineStats:
        answer: EngineStats = await self._ask(self._silent, "stats")
        return answer

    def check(self) -> None:
        if self._failure is not None:
            raise EngineFailed(str(self._failure))

    def progress(self, have: Mapping[str, int]) -> dict[str, TokenSpan]:
        return {id: self._calls[id].partial().after(have[id]) for id in have if id in self._calls}

    async def close(self) -> None:
        if self._attached is not None and self._failure is None:
            with suppress(EngineFailed):  # an actor that does not answer is killed below
                await self._ask_as_owner(CLOSE_SECONDS, "close")
        failure = self._fail(EngineFailed(f"{self._name} is closed"))
        if self._attached is None or isinstance(failure, OwnershipLost):
            return  # another client has taken over the engine
        if not (self._keep_actor and self._answers):
            ray.kill(self._actor)

    async def owns(self) -> bool:
        """Return whether the engine actor still serves this client, and still runs the same engine."""
        try:
            await self._ask_as_owner(self._silent, "abort", [])
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
                self._waiting[number].submit = task

    async def _wait_submitted(self) -> None:
        """Send all pending requests to the engine actor, and wait until the actor has received them."""
        self._flush()
        if self._submits:
            # Unlike `asyncio.gather`, `asyncio.wait` does not cancel the tasks that send requests.
            await asyncio.wait(self._submits)

    async def _submit(self, batch: list[GenerationRequest]) -> None:
        try:
            await self._ask_as_owner(self._silent, "submit", pack_requests(batch))
        except EngineFailed:
            return  # the error was already raised at every waiting caller
        except Exception as error:  # noqa: BLE001 - whatever the error is, no caller may wait forever
            self._fail(EngineFailed(f"{self._name} could not take a request: {error!r}"))
            return
        if self._collector is None or self._collector.done():
            self._collector = asyncio.create_task(self._collect())

    async def _collect(self) -> None:
        """Collect results from the engine actor and deliver them to the waiting callers, until no caller waits."""
        try:
            while self._waiting:
                self._check_moving(self._deliver(await self._ask_as_owner(self._silent, "collect")))
        except EngineFailed:
            return  # the error was already raised at every waiting caller
        except Exception as error:  # noqa: BLE001 - whatever the error is, no caller may wait forever
            self._fail(EngineFailed(f"the results of {self._name} could not be collected: {error!r}"))

    def _deliver(self, collected: Collected) -> bool:
        """Deliver results and new tokens to the callers; return True if there were any."""
        packed, errors, report = collected
        progress = unpack_partials(report)
        for number, new in progress.items():
            if new and number in self._waiting:  # the caller of the request may have been cancelled
                self._waiting[number].add(new)
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
            raise self._fail(
                EngineFailed(
                    f"{self._name} hangs: it has running requests, but generated no token for {self._silent:g} s"
                )
            )

    def _settle(self, number: str, outcome: Generation | Exception) -> None:
        if isinstance(outcome, EngineFailed):
            self._fail(outcome)
        call = self._waiting.get(number)
        if call is None or call.answer.done():
            return  # the caller of the request was cancelled
        if isinstance(outcome, Exception):
            call.answer.set_exception(outcome)
        else:
            call.answer.set_result(outcome)

    def _drop_cancelled(self, call: PendingCall) -> None:
        """Abort a request whose caller was cancelled, so that the engine can run another request."""
        if self._outbox.pop(call.number, None) is None and call.submit is not None:
            call.submit.add_done_callback(lambda _: self._abandon(call.number))  # abort only after the submit

    def _abandon(self, number: str) -> None:
        if self._failure is None:
            self._actor.abort.remote(self._owner, [number])

    async def _ask_as_owner(self, seconds: float, method: str, *arguments: Any) -> Any:
        """Call a method that the engine actor allows only to its current client."""
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
            raise self._fail(
                EngineFailed(f"{self._name} did not answer the call {method} within {seconds:.0f} s")
            ) from error
        except EngineFailed as error:
            kind = OwnershipLost if isinstance(error, OwnershipLost) else EngineFailed
            raise self._fail(kind(f"{self._name} failed in the call {method}: {_read_message(error)}")) from error
        except RayError as error:
            if isinstance(error, ray.exceptions.RayTaskError):
                raise  # the actor's method raised this error, so the actor is alive
            self._answers = False
            raise self._fail(EngineFailed(f"the actor of {self._name} died: {error}")) from error

    def _fail(self, failure: EngineFailed) -> EngineFailed:
        """Fail all waiting calls with the engine's first failure, and return this failure as a new exception."""
        self._failure = self._failure or failure
        for call in self._waiting.values():
            if not call.answer.done():
                call.answer.set_exception(EngineFailed(str(self._failure)))
        # A copy is returned, because an error that has been raised keeps stack frames in memory.
        return type(self._failure)(str(self._failure))


@dataclass(eq=False, slots=True)
class PendingCall:
    """A generation request whose caller waits for the result, or waited for it when the engine failed.

    `number` is the id under which the request is sent to the actor, because a caller may reuse its own id.
    """

    number: str
    answer: asyncio.Future[Generation]  # deleted when the caller stops waiting
    submit: asyncio.Task[None] | None = None  # the task that sends the request to the actor
    _arrived: ReceivedTokens | None = None  # None before the first token

    def add(self, new: TokenSpan) -> None:
        """Append tokens that the actor has reported."""
        if self._arrived is None:
            self._arrived = ReceivedTokens()
        self._arrived.add(new)

    def partial(self) -> TokenSpan:
        """Return all tokens that the actor has reported."""
        return TokenSpan() if self._arrived is None else self._arrived.partial()


class ReceivedTokens:
    """The tokens received for a running request, in three growing buffers, so that appending tokens is cheap."""

    __slots__ = ("_logprobs", "_tokens", "_versions")

    def __init__(self) -> None:
        self._tokens, self._logprobs, self._versions = bytearray(), bytearray(), bytearray()

    def add(self, new: TokenSpan) -> None:
        """Append new tokens."""
        self._tokens += new.tokens.data
        self._logprobs += new.logprobs.data
        self._versions += new.versions.data

    def partial(self) -> TokenSpan:
        """Return all received tokens."""
        return TokenSpan(Int32s(bytes(self._tokens)), Float32s(bytes(self._logprobs)), Int32s(bytes(self._versions)))


def _read_message(error: EngineFailed) -> str:
    """Return the message of an error from an actor, without the traceback that Ray adds."""
    return str(getattr(error, "cause", error))
