"""Responses collected from vLLM's core, compared with plain lists: whatever the outputs contain, in any order, and
whatever is aborted, cancelled or dies, each caller gets its own tokens, and nothing of an ended response is kept.

The core is simulated here; vLLM's own types are used. `contracts/test_engines` tests the engine with its processes.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.errors import ConfigError, EngineFailed
from rollflow.storage.model_input import ForeignPart, ModelInput
from rollflow.storage.records import StopReason
from rollflow.storage.token_arrays import Float32s, Int32s
from rollflow.tasks.engines.base import Generation, GenerationRequest, TokenSpan
from rollflow.tasks.engines.config import VllmEngineConfig
from rollflow.tasks.engines.vllm.engine import VllmEngine
from rollflow.tasks.runtime.clock import run_virtual
from tests.support.tiny_policy import letter, make_letters

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]

STOP, LENGTH, ABORT, ERROR = range(4)  # vLLM's FinishReason
ENDINGS = {STOP: StopReason.STOP, LENGTH: StopReason.LENGTH, ABORT: StopReason.ABORTED}
PREFIX = TokenSpan.of((501, 502, 503), (-0.5, -0.25, -1.0), (0, 0, 1))
VOCABULARY = 1000
THREE, THREE_FOUR = ModelInput.of((3,)), ModelInput.of((3, 4))


class Core:
    """vLLM's front end, as far as `VllmEngine` and `Responses` use it; it records what is sent to the core."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(max_model_len=64, get_vocab_size=lambda: VOCABULARY)
        self.input_processor = SimpleNamespace(process_inputs=self._processed)
        self.engine_core = self
        self.output_processor: Any = None
        self.dead = False
        self.sent: list[Any] = []
        self.aborted: list[str] = []
        self.refuses: Exception | None = None

    @property
    def errored(self) -> bool:
        return self.dead

    def _run_output_handler(self) -> None: ...

    @staticmethod
    def _processed(id: str, prompt: Any, params: Any, **_: Any) -> Any:
        return SimpleNamespace(sampling_params=params)

    async def add_request_async(self, request: Any) -> None:
        await asyncio.sleep(0)
        if self.refuses is not None:
            raise self.refuses
        self.sent.append(request)

    async def abort_requests_async(self, ids: list[str]) -> None:
        await asyncio.sleep(0)
        self.aborted += ids

    def tell(self, outputs: Sequence[Any], version: str) -> None:
        """Pass on the output of a step, as vLLM's output handler does."""
        try:
            self.output_processor.process_outputs(list(outputs), 0.0, None, weight_version=version)
        except Exception as error:  # noqa: BLE001 - as there
            self.die(error)

    def die(self, error: Exception) -> None:
        self.dead = True
        self.output_processor.propagate_error(error)


def output(id: str, tokens: Sequence[int], logprobs: Sequence[float], end: int | None = None) -> Any:
    """Build a step's output for one request."""
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.outputs import LogprobsLists

    rows = np.array([[logprob, 0.0] for logprob in logprobs], np.float32).reshape(-1, 2)
    found = LogprobsLists(np.zeros(rows.shape, np.int32), rows, np.zeros(len(rows), np.int32)) if tokens else None
    return EngineCoreOutput(id, list(tokens), found, finish_reason=None if end is None else FinishReason(end))


def engine_on(core: Core, folder: Path) -> VllmEngine:
    """Build an engine that uses `core` in place of vLLM's."""
    from rollflow.tasks.engines.vllm.responses import Responses

    (folder / "config.json").write_text('{"eos_token_id": 2}')
    engine = VllmEngine(VllmEngineConfig(), folder)
    engine._llm, engine._version = core, 0
    engine._responses = Responses(core, (2,))  # type: ignore[arg-type]
    return engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("policy")


# --- by hand ----------------------------------------------------------------------------------------------------


@dataclass
class Running:
    """A running response."""

    folder: Path
    core: Core = field(default_factory=Core)

    async def begun(self, prefix: TokenSpan = PREFIX) -> Running:
        self.engine = engine_on(self.core, self.folder)
        self.task = asyncio.create_task(self.engine.generate(GenerationRequest("a", THREE, 8, prefix=prefix)))
        while not self.core.sent:
            await asyncio.sleep(0)
        self.id = self.core.sent[0].request_id
        return self

    @property
    def empty(self) -> bool:
        return not (self.engine._running or self.engine._responses._running)


def test_stop_string_ends_a_response_and_its_request(tmp_path: Path) -> None:
    """The stop string begins in the prefix, and ends within a step; the core still generates until it is aborted."""
    make_letters(tmp_path)
    prefix = TokenSpan.of((50, 51), (-0.5, -0.25), (0, 0))

    async def main() -> None:
        core = Core()
        engine = engine_on(core, tmp_path)
        asked = GenerationRequest("a", THREE, 8, prefix=prefix, stop=("never", letter(51) + letter(52) + letter(53)))
        task = asyncio.create_task(engine.generate(asked))
        while not core.sent:
            await asyncio.sleep(0)
        id = core.sent[0].request_id

        def step(*tokens: int) -> list[str]:
            outputs = [output(id, tokens, [-1.0] * len(tokens))]
            return list(core.output_processor.process_outputs(outputs, 0.0, None, weight_version="1").reqs_to_abort)

        assert step(52) == []
        assert engine.progress({"a": 0})["a"].tokens == (50, 51, 52)
        assert step(53, 54) == [id]
        assert step(55) == []
        made = await task
        assert (made.tokens, made.ending) == ((50, 51, 52, 53), StopReason.STOP)
        assert made.logprobs == (-0.5, -0.25, -1.0, -1.0)
        assert made.versions == (0, 0, 1, 1)
        assert not engine._running
        assert not engine._responses._running

    run_virtual(main())


@pytest.mark.parametrize("end", [STOP, LENGTH])
def test_last_token_is_reported_only_at_the_end_of_a_response(folder: Path, end: int) -> None:
    """If the last token came before the end, another engine could continue after the end of the response."""

    async def main() -> None:
        running = await Running(folder).begun()
        running.core.tell([output(running.id, (4,), (-1.0,))], "1")
        assert running.engine.progress({"a": 2})["a"].tokens == (503, 4)
        running.core.tell([output(running.id, (2,), (-1.0,), end)], "1")
        assert running.engine.progress({"a": 2}) == {}  # its caller has not run yet
        made = await running.task
        assert made.tokens == (501, 502, 503, 4, 2)
        assert made.versions == (0, 0, 1, 1, 1)
        assert running.empty

    run_virtual(main())


@pytest.mark.parametrize(("logprobs", "why"), [(None, "AttributeError"), ((-1.0,), "2 tokens and 1 log-probs")])
def test_unreadable_vllm_output_fails_the_engine(folder: Path, logprobs: tuple[float, ...] | None, why: str) -> None:
    """Unreadable output is no error of the caller, and earlier tokens are known, so another engine can continue."""

    async def main() -> None:
        running = await Running(folder).begun()
        running.core.tell([output(running.id, (4,), (-1.0,))], "1")
        odd = output(running.id, (5, 6), logprobs or ())
        odd.new_logprobs = odd.new_logprobs if logprobs else None
        running.core.tell([odd], "2")
        with pytest.raises(EngineFailed, match=why):
            await running.task
        assert running.engine.progress({"a": 0})["a"] == PREFIX + TokenSpan.of((4,), (-1.0,), (1,))

    run_virtual(main())


def test_request_that_cannot_be_sent_to_vllm_is_forgotten(folder: Path) -> None:
    async def main() -> None:
        core = Core()
        core.refuses = OverflowError("no such number")
        engine = engine_on(core, folder)
        with pytest.raises(OverflowError):
            await engine.generate(GenerationRequest("a", THREE, 8))
        assert not engine._running
        assert not engine._responses._running

    run_virtual(main())


def test_prompt_with_an_image_is_refused(folder: Path) -> None:
    async def main() -> None:
        core = Core()
        mixed = (Int32s.of((3, 4)), ForeignPart("image", "5e" * 32, 2))
        with pytest.raises(ConfigError, match=r"the vLLM engine reads tokens alone, .* 'image' at position 2"):
            await engine_on(core, folder).generate(GenerationRequest("a", ModelInput.from_parts(mixed), 8))
        assert not core.sent

    run_virtual(main())


def test_repeated_request_id_is_refused_while_it_runs(folder: Path) -> None:
    async def main() -> None:
        running = await Running(folder).begun()
        with pytest.raises(ValueError, match="request 'a' is already running"):
            await running.engine.generate(GenerationRequest("a", THREE, 8))
        running.core.tell([output(running.id, (2,), (-1.0,), STOP)], "1")
        assert (await running.task).tokens == (501, 502, 503, 2)
        assert running.empty

    run_virtual(main())


def test_finished_requests_leave_no_state_behind(folder: Path) -> None:
    """Ten thousand requests, most of which do not end normally, leave nothing behind."""

    async def main() -> None:
        core, draw = Core(), random.Random(1)
        engine = engine_on(core, folder)
        sizes = []
        for number in range(10_000 // 50):
            await fifty(core, engine, draw, number)
            core.sent.clear()
            core.aborted.clear()
            assert not engine._running
            assert not engine._responses._running
            assert not engine._responses.request_states
            if number % 50 == 49:
                for _ in range(2):  # the event loop refers to the last requests for two more iterations
                    await asyncio.sleep(0)
                gc.collect()
                sizes.append(len(gc.get_objects()))
        # the first requests also fill caches of Python, such as those of `isinstance` with an abstract class
        assert max(sizes[1:]) - min(sizes[1:]) < 100, sizes  # one object for each request would be 2,500

    run_virtual(main())


async def fifty(core: Core, engine: VllmEngine, draw: random.Random, number: int) -> None:
    """Send fifty requests: some end, others are aborted, cancelled, or cancelled before they are sent."""
    tasks = [
        asyncio.create_task(engine.generate(GenerationRequest(f"{number}.{one}", THREE, 8, draw.choice((0.5, 1.0)))))
        for one in range(50)
    ]
    await asyncio.sleep(0)
    for task in draw.sample(tasks, 10):
        task.cancel()
    await asyncio.sleep(0.1)
    ids = [request.request_id for request in core.sent]
    core.tell([output(id, (4, 5), (-1.0, -2.0)) for id in ids], "1")
    await engine.abort([f"{number}.{one}" for one in draw.sample(range(50), 10)])
    core.tell([output(id, (2,), (-1.0,), draw.choice((None, STOP, LENGTH, ABORT))) for id in ids], "1")
    for task in tasks:
        draw.random() < 0.3 and task.cancel()
    await asyncio.sleep(0.1)
    await engine.abort([f"{number}.{one}" for one in range(50)])
    await asyncio.gather(*tasks, return_exceptions=True)


# --- drawn ------------------------------------------------------------------------------------------------------

PLACES = st.integers(0, 7)
ENDS = st.sampled_from([None, None, None, STOP, LENGTH, ABORT, ERROR])
OUTPUTS = st.lists(st.tuples(PLACES, st.integers(0, 3), ENDS), min_size=1, max_size=6)
STEPS = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from([TokenSpan(), PREFIX, PREFIX.before(1)])),
    st.tuples(st.just("step"), OUTPUTS),
    st.tuples(st.just("abort"), st.lists(PLACES, max_size=3)),
    st.tuples(st.just("cancel"), PLACES),
    st.tuples(st.just("update"), st.booleans()),
    st.tuples(st.just("yield"), st.just(None)),
)


@dataclass
class Expected:
    """A response as the core made it, in plain lists."""

    task: asyncio.Task[Generation]
    id: str
    core_id: str
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    ending: StopReason | str | None = None  # "failed"
    cancelled: bool = False


class Script:
    """Performs random steps, and records the expected results."""

    def __init__(self, folder: Path) -> None:
        self.core = Core()
        self.engine = engine_on(self.core, folder)
        self.asked: list[Expected] = []
        self.version = 0
        self.numbers = itertools.count(10)

    async def step(self, what: str, drawn: Any) -> None:
        match what:
            case "ask":
                await self.ask(drawn)
            case "step":
                self.tell(drawn)
            case "abort":
                await self.abort([place for place in drawn if place < len(self.asked)])
            case "cancel" if drawn < len(self.asked):
                one = self.asked[drawn]
                one.cancelled |= one.task.cancel()
                await asyncio.wait([one.task])
            case "update":
                self.version += 1
            case "yield":
                await asyncio.sleep(0)
        self.check_progress()

    async def ask(self, prefix: TokenSpan) -> None:
        id, before = f"r{len(self.asked)}", len(self.core.sent)
        task = asyncio.create_task(self.engine.generate(GenerationRequest(id, THREE_FOUR, 1000, prefix=prefix)))
        while len(self.core.sent) == before:
            await asyncio.sleep(0)
        parts = list(prefix.tokens), list(prefix.logprobs), list(prefix.versions)
        self.asked.append(Expected(task, id, self.core.sent[-1].request_id, *parts))

    def tell(self, drawn: list[tuple[int, int, int | None]]) -> None:
        """Send a step's output, also for ended requests, because the core may learn of an end later."""
        outputs = []
        for one, count, end in [(self.asked[place], *rest) for place, *rest in drawn if place < len(self.asked)]:
            tokens = list(itertools.islice(self.numbers, count))
            logprobs = list(Float32s.of([-token / 7 for token in tokens]))
            outputs.append(output(one.core_id, tokens, logprobs, end))
            if one.ending is None and not one.cancelled:
                one.tokens += tokens
                one.logprobs += logprobs
                one.versions += [self.version] * count
                one.ending = None if end is None else ENDINGS.get(end, "failed")
        self.core.tell(outputs, str(self.version))

    async def abort(self, places: list[int]) -> None:
        for place in places:
            one = self.asked[place]
            one.ending = one.ending or StopReason.ABORTED
        await self.engine.abort([self.asked[place].id for place in places])

    def check_progress(self) -> None:
        for since in (0, 2, 5):
            found = self.engine.progress({one.id: since for one in self.asked})
            running = [one for one in self.asked if one.ending is None and not one.cancelled]
            failed = {one.id for one in self.asked if one.ending == "failed"}
            assert found.keys() - failed == {one.id for one in running}
            for one in running:
                assert found[one.id] == said(one).after(since)

    async def check_end(self, one: Expected) -> None:
        if one.cancelled:
            assert one.task.cancelled()
        elif one.ending == "failed":
            with pytest.raises(EngineFailed, match="vLLM ended a response for the unexpected reason error"):
                await one.task
        else:
            assert await one.task == Generation(one.id, said(one), one.ending or StopReason.STOP)


def said(one: Expected) -> TokenSpan:
    """Build the expected part of a response."""
    return TokenSpan.of(one.tokens, one.logprobs, one.versions)


async def ran(script: Script, steps: list[Any]) -> Script:
    for step in steps:
        await script.step(*step)
    return script


@settings(deadline=None)
@given(st.lists(STEPS, max_size=30))
def test_each_vllm_request_gets_its_own_tokens(folder: Path, steps: list[Any]) -> None:
    async def main() -> None:
        script = await ran(Script(folder), steps)
        script.tell([(place, 1, STOP) for place in range(len(script.asked))])
        for one in script.asked:
            await script.check_end(one)
        assert not script.engine._running
        assert not script.engine._responses._running

    run_virtual(main())


@settings(deadline=None)
@given(st.lists(STEPS, max_size=30), st.booleans())
def test_death_of_vllm_fails_callers_and_keeps_their_tokens(folder: Path, steps: list[Any], foreign: bool) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    async def main() -> None:
        script = await ran(Script(folder), steps)
        script.core.die(RuntimeError("odd") if foreign else EngineDeadError())
        for one in script.asked:
            if one.ending is None and not one.cancelled:
                with pytest.raises(EngineFailed):
                    await one.task
            else:
                await script.check_end(one)
        script.check_progress()
        with pytest.raises(EngineFailed):
            await script.engine.generate(GenerationRequest("late", THREE, 8))

    run_virtual(main())
