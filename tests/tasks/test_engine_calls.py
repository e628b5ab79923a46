"""Tests of calls to an engine in an actor. Whatever is cancelled, slow or repeated, each caller gets its own whole
response. A request for which no caller waits is ended.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.errors import EngineFailed
from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import StopReason
from rollflow.tasks.actors.engine_client import RayEngine
from rollflow.tasks.engines.base import Generation, GenerationRequest, InFlight
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.rollout.proxy import InferenceProxy, WeightsProbe
from rollflow.tasks.runtime.clock import run_virtual
from tests.support.here import Here
from tests.support.near_actor import Near, NearEngineActor

TIMED = TimedEngineConfig(
    median_tokens=100, sigma=0.0, seconds_per_token=0.01, update_seconds=0.0, max_concurrent_requests=4
)
HERE = Here()


@dataclass
class Called:
    """An engine, its actor, and a client."""

    delays: tuple[float, ...] = (0.0,)
    inner: TimedEngine = field(default_factory=lambda: TimedEngine(TIMED))

    def __post_init__(self) -> None:
        self.actor = NearEngineActor(self.inner)
        self.near = Near(self.actor, self.delays)
        self.engine = RayEngine(self.near, keep_actor=True)

    async def begun(self) -> Called:
        """Start the engine with version 0."""
        await self.engine.suspend("continue")
        await self.engine.update(0, HERE)
        await self.engine.resume()
        return self

    @property
    def idle(self) -> bool:
        """True if no request has left anything in the client or the actor."""
        return not (self.inner.active or self.inner._runs or self.actor._have or self.engine._waiting)

    def asked(self, id: str, seed: int, tokens: int = 100) -> asyncio.Task[Generation]:
        """Request a response, and return the task that waits for it."""
        return asyncio.create_task(self.engine.generate(GenerationRequest(id, ModelInput.of((3,)), tokens, seed=seed)))


async def whole(seed: int, tokens: int = 100) -> Generation:
    """Return the response that this seed gives on an undisturbed engine."""
    engine = TimedEngine(TIMED.model_copy(update={"seconds_per_token": 0.0}))
    return await engine.generate(GenerationRequest("", ModelInput.of((3,)), tokens, seed=seed))


@pytest.mark.parametrize("pause", [0.0, 0.001, 1.0])
def test_repeated_request_id_is_a_new_request(pause: float) -> None:
    """After a voided batch the scheduler restarts, and requests again what was in flight."""

    async def main() -> None:
        called = await Called().begun()
        first = called.asked("a", seed=1)
        await asyncio.sleep(0.4)
        first.cancel()
        await asyncio.wait([first])
        await asyncio.sleep(pause)
        second = called.asked("a", seed=2)
        await asyncio.sleep(0.6)
        expected, said = await whole(2), called.engine.progress({"a": 0})["a"]
        assert 0 < len(said) < 100
        assert said.tokens == expected.tokens[: len(said)]
        made = await second
        assert (made.id, made.tokens, made.ending) == ("a", expected.tokens, expected.ending)
        assert called.idle

    run_virtual(main())


def test_cancel_before_submit_leaves_nothing_running() -> None:
    async def main() -> None:
        called = Called(delays=(0.1,))  # the client's first call is slow, because the client must attach first
        cancelled, other = called.asked("a", seed=1), called.asked("b", seed=2)
        await asyncio.sleep(0.05)
        cancelled.cancel()
        await other
        assert called.inner.usage.tokens < 150
        assert called.idle

    run_virtual(main())


@pytest.mark.parametrize("call", [lambda engine: engine.abort(["b"]), lambda engine: engine.suspend("continue")])
def test_cancelled_caller_affects_no_other_request(call: Callable[[RayEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        called = Called(delays=(0.1,))
        made = called.asked("a", seed=1)
        await asyncio.sleep(0)
        cancelled = asyncio.ensure_future(call(called.engine))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        await called.engine.resume()
        assert (await asyncio.wait_for(made, 100.0)).tokens == (await whole(1)).tokens

    run_virtual(main())


def test_unreadable_engine_message_ends_every_wait() -> None:
    async def main() -> None:
        called = await Called().begun()
        vars(called.actor)["collect"] = unreadable
        with pytest.raises(EngineFailed, match="the results of engine could not be collected: ValueError"):
            await asyncio.wait_for(called.asked("a", seed=1), 100.0)

    async def unreadable(owner: str) -> None:
        raise ValueError("no such ending")

    run_virtual(main())


def test_dead_engine_is_freed_once_its_requests_run_elsewhere() -> None:
    """The dead engine is freed immediately, and not at the next full garbage collection, which may be hours away."""

    async def main() -> None:
        dead, other = Called(), Called()
        proxy = InferenceProxy([dead.engine, other.engine], 4, replacement_seconds=100.0)
        await proxy.update(0, HERE, WeightsProbe((), (), 0.1), "continue")
        requests = [GenerationRequest(f"r{seed}", ModelInput.of((3,)), 100, seed=seed) for seed in range(6)]
        running = [asyncio.create_task(proxy.generate(request)) for request in requests]
        await asyncio.sleep(0.6)
        engine = weakref.ref(dead.engine)
        dead.inner.kill()
        await asyncio.gather(*running)
        assert proxy.taken_over
        await proxy.join(0, Called().engine)
        await asyncio.sleep(5.0)
        del dead
        assert engine() is None

    gc.collect()
    gc.disable()
    try:
        run_virtual(main())
    finally:
        gc.enable()


# --- random calls -----------------------------------------------------------------------------------------------

IDS = st.sampled_from("abc")
STEPS = st.one_of(
    st.tuples(st.just("ask"), IDS),
    st.tuples(st.just("cancel"), IDS),
    st.tuples(st.just("abort"), IDS),
    st.tuples(st.just("update"), st.sampled_from(["continue", "restart"])),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 0.001, 0.1, 0.35, 1.5])),
)


@dataclass
class Asked:
    """A requested response, with its task and the expected result."""

    task: asyncio.Task[Generation]
    whole: Generation
    may_end: bool = False  # True if the response may have ended early


class Caller:
    """Makes random calls, and knows what each of them must return."""

    def __init__(self, delays: tuple[float, ...]) -> None:
        self.called = Called(delays)
        self.asked: list[Asked] = []
        self.newest: dict[str, Asked] = {}
        self.version = 0

    async def step(self, what: str, which: Any) -> None:
        match what:
            case "ask" if which not in self.newest or self.newest[which].task.done():
                seed = len(self.asked)
                one = Asked(self.called.asked(which, seed), replace(await whole(seed), id=which))
                self.asked.append(one)
                self.newest[which] = one
            case "cancel" if which in self.newest:
                self.newest[which].task.cancel()
            case "abort":
                if which in self.newest:
                    self.newest[which].may_end = True
                await self.called.engine.abort([which])
            case "update":
                await self.update(which)
            case "wait":
                await asyncio.sleep(which)
        self.check_progress()

    async def update(self, in_flight: InFlight) -> None:
        self.version += 1
        for one in self.asked:
            one.may_end |= in_flight == "restart"
        await self.called.engine.suspend(in_flight)
        await self.called.engine.update(self.version, HERE)
        await self.called.engine.resume()

    def check_progress(self) -> None:
        for id, said in self.called.engine.progress(dict.fromkeys("abc", 0)).items():
            assert said.tokens == self.newest[id].whole.tokens[: len(said)]
            assert len(said) < 100 or self.newest[id].task.done()  # the last token comes with the result
            assert self.called.engine.progress({id: 3})[id] == said.after(3)

    def check(self, one: Asked) -> None:
        if one.task.cancelled():
            return
        made = one.task.result()
        assert made.tokens == one.whole.tokens[: len(made.tokens)]
        assert made.id == one.whole.id
        assert made.ending == (one.whole.ending if len(made.tokens) == 100 else StopReason.ABORTED)
        assert len(made.tokens) == 100 or one.may_end
        assert list(made.versions) == sorted(made.versions)
        assert len(made.versions) == len(made.logprobs) == len(made.tokens)


DRAWN = settings(deadline=None)
SCRIPTS = st.lists(STEPS, max_size=15), st.lists(st.sampled_from([0.0, 0.002, 0.1]), min_size=1, max_size=3)


async def acted(steps: list[Any], delays: list[float]) -> Caller:
    """Build a caller that has taken these steps."""
    caller = Caller(tuple(delays))
    await caller.called.begun()
    for step in steps:
        await caller.step(*step)
    return caller


@DRAWN
@given(*SCRIPTS)
def test_every_caller_gets_its_own_response(steps: list[Any], delays: list[float]) -> None:
    async def main() -> None:
        caller = await acted(steps, delays)
        await asyncio.wait_for(asyncio.gather(*(one.task for one in caller.asked), return_exceptions=True), 100.0)
        for one in caller.asked:
            caller.check(one)
        await asyncio.sleep(1.0)
        assert caller.called.idle
        assert not caller.called.engine.progress(dict.fromkeys("abc", 0))

    run_virtual(main())


@DRAWN
@given(*SCRIPTS)
def test_engine_death_ends_every_wait_and_keeps_received_tokens(steps: list[Any], delays: list[float]) -> None:
    async def main() -> None:
        caller = await acted(steps, delays)
        before = caller.called.engine.progress(dict.fromkeys("abc", 0))
        waiting = {id: one for id, one in caller.newest.items() if not one.task.done() and not one.task.cancelling()}
        caller.called.inner.kill()
        await asyncio.wait_for(asyncio.gather(*(one.task for one in caller.asked), return_exceptions=True), 100.0)
        caller.check_progress()
        after = caller.called.engine.progress(dict.fromkeys("abc", 0))
        for id, one in waiting.items():
            if isinstance(one.task.exception(), EngineFailed):
                assert len(after[id]) >= len(before[id])
            else:
                caller.check(one)

    run_virtual(main())
