"""Tests the contract of engines, which `rollflow.tasks.engines.base` describes. These tests need pytest-asyncio."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pytest
import pytest_asyncio

from rollflow.storage.errors import ConfigError, EngineFailed
from rollflow.storage.model_input import ForeignPart, ModelInput
from rollflow.storage.records import StopReason
from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.engines.base import Engine, Generation, GenerationRequest, TokenSpan
from rollflow.testing.bounds import HANG_SECONDS, assert_raises

LONG = 200


class ReferenceModel(Protocol):
    """Computes the values that an engine should return: log-probs, and the most probable tokens, under a version's
    weights.
    """

    def logprobs(self, version: int, tokens: Sequence[int], temperature: float = 1.0) -> Sequence[float]:
        """Return the log-probability (nats) of each of `tokens[1:]`, given the tokens before it."""

    def greedy(self, version: int, prompt: Sequence[int], count: int) -> Sequence[int]:
        """Return `count` tokens after the prompt, each of which is the most probable next token."""


def find_no_weights(version: int) -> Any:
    """Return an empty path, for an engine without weights."""
    return Path()


async def close_engine(engine: Engine) -> None:
    """Close an engine, to which no more calls are sent."""
    await engine.close()


@dataclass
class EngineCase:
    """An engine under test, with the requests and weights that tests need.

    `weights` returns the argument of `update` for a version. Even and odd versions should have different weights. If
    `reference` is None, the tests that compare log-probs are skipped.
    """

    engine: Engine
    weights: Callable[[int], Any] = find_no_weights
    reference: ReferenceModel | None = None
    eos: int | None = None  # the token that ends a response
    letter: Callable[[int], str] = chr  # the text of a token, as stop strings read it
    kill: Callable[[Engine], Awaitable[None]] = close_engine
    hang_seconds: float = HANG_SECONDS
    versions: int = 0
    ids: int = 0

    def request(self, max_new_tokens: int = 8, *, temperature: float = 1.0) -> GenerationRequest:
        """Return a new request; each has another prompt and another seed."""
        self.ids += 1
        prompt = ModelInput.of((3 + self.ids % 50, 7, 11))
        return GenerationRequest(f"request-{self.ids}", prompt, max_new_tokens, temperature, seed=self.ids)

    async def update(self) -> int:
        """Update the engine to the next version, and return the version."""
        self.versions += 1
        await self.engine.update(self.versions, self.weights(self.versions))
        return self.versions


@asynccontextmanager
async def open_case(case: EngineCase) -> AsyncIterator[EngineCase]:
    """Start the engine with version 0, and close it at the end."""
    engine = case.engine
    await engine.start()
    assert engine.version == -1, "before the first update the version must be -1"
    await engine.suspend("continue")
    await engine.update(0, case.weights(0))
    await engine.resume()
    yield case
    await engine.close()


async def start_requests(
    case: EngineCase, count: int = 8
) -> tuple[list[GenerationRequest], list[asyncio.Task[Generation]]]:
    """Start requests with long responses, and wait until the engine has reported some tokens."""
    requests = [case.request(LONG) for _ in range(count)]
    tasks = [asyncio.create_task(case.engine.generate(request)) for request in requests]
    ids = {request.id: 2 for request in requests}
    async with asyncio.timeout(case.hang_seconds):
        while not any(case.engine.progress(ids).values()):
            assert not all(task.done() for task in tasks), "`progress` must return the tokens of running requests"
            await asyncio.sleep(0.002)
    return requests, tasks


def begin_of(generation: Generation, count: int) -> TokenSpan:
    """Return the first tokens of a response."""
    return generation.made.before(count)


def check(generation: Generation) -> None:
    """Check the properties that every generation must have."""
    assert len(generation.tokens) == len(generation.logprobs), (
        f"every token must have its log-prob: {len(generation.tokens)} tokens, {len(generation.logprobs)} log-probs"
    )
    assert len(generation.tokens) == len(generation.versions), "every token must have its version"
    assert list(generation.versions) == sorted(generation.versions), "within a response, versions must never decrease"
    assert all(logprob <= 0 for logprob in generation.logprobs), "a log-prob must be 0 or less"


def first_stop(case: EngineCase, tokens: Sequence[int], stop: str) -> int | None:
    """Return the length of the shortest prefix of `tokens` that contains the stop string."""
    found = (count for count in range(len(tokens) + 1) if stop in "".join(map(case.letter, tokens[:count])))
    return next(found, None)


@pytest.mark.asyncio(loop_scope="class")
class EngineContract:
    """Tests of an engine, which all tests of the class share. A subclass builds the engine by `build`."""

    # a pattern in the error message with which the engine refuses a prompt with an image
    foreign: ClassVar[str] = "kind 'image' at position 2 "

    def build(self) -> EngineCase:
        """Return the engine under test. The engine must not be started yet."""
        raise NotImplementedError(f"{type(self).__name__} must build the engine: def build(self) -> EngineCase")

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def case(cls) -> AsyncIterator[EngineCase]:
        """Yield the engine under test, with version 0; a subclass may override this fixture."""
        async with open_case(cls().build()) as case:
            yield case

    async def test_text_only_engine_refuses_an_image(self, case: EngineCase) -> None:
        """An engine that reads only tokens refuses the image in one sentence that names it, and other requests
        continue.
        """
        mixed = ModelInput.from_parts([Int32s.of((3, 7)), ForeignPart("image", "5e" * 32, 4), Int32s.of((11,))])
        asked = replace(case.request(), prompt=mixed), case.request()
        refused, generation = await asyncio.gather(*map(case.engine.generate, asked), return_exceptions=True)
        assert isinstance(refused, ConfigError), f"a part that cannot be read must raise ConfigError, but: {refused!r}"
        assert re.search(self.foreign, str(refused)), f"the refusal must match {self.foreign!r}: {refused}"
        assert isinstance(generation, Generation)
        check(generation)

    async def test_generation_names_the_policy_version_in_use(self, case: EngineCase) -> None:
        requests = [case.request(LONG if i == 0 else 4 + i) for i in range(20)]
        generations = await asyncio.gather(*map(case.engine.generate, requests))
        for request, generation in zip(requests, generations, strict=True):
            check(generation)
            assert generation.id == request.id, "a generation must have the id of its request"
            assert set(generation.versions) == {case.engine.version}, "a token must have the version of its weights"
            if generation.ending is StopReason.LENGTH:
                assert len(generation.tokens) == request.max_new_tokens
            else:
                assert generation.ending is StopReason.STOP
                assert generation.tokens[-1] == case.eos or case.eos is None

    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    async def test_logprobs_are_of_the_sampling_distribution(self, case: EngineCase, temperature: float) -> None:
        if case.reference is None:
            pytest.skip("the case has no reference model")
        request = case.request(40, temperature=temperature)
        generation = await case.engine.generate(request)
        tokens = request.prompt.tokens + generation.tokens
        expected = case.reference.logprobs(case.engine.version, tokens, temperature)
        assert generation.logprobs == pytest.approx(expected[request.prompt.length - 1 :], abs=1e-4)

    async def test_temperature_zero_is_greedy(self, case: EngineCase) -> None:
        if case.reference is None:
            pytest.skip("the case has no reference model")
        requests = [case.request(12, temperature=0.0) for _ in range(3)]
        generations = await asyncio.gather(*map(case.engine.generate, requests))
        version, reference = case.engine.version, case.reference
        for request, generation in zip(requests, generations, strict=True):
            greedy = reference.greedy(version, request.prompt.tokens, len(generation.tokens))
            assert list(generation.tokens) == list(greedy)
            expected = reference.logprobs(version, request.prompt.tokens + generation.tokens)
            assert generation.logprobs == pytest.approx(expected[request.prompt.length - 1 :], abs=1e-4)

    async def test_probe_logprobs_agree_with_the_model(self, case: EngineCase) -> None:
        tokens = tuple(range(3, 43))
        answer = await case.engine.logprobs(tokens)
        if case.reference is None:
            assert answer is None
            return
        expected = case.reference.logprobs(case.engine.version, tokens)
        assert answer == pytest.approx(expected, abs=1e-4)

    async def test_suspended_engine_generates_no_token(self, case: EngineCase) -> None:
        requests, tasks = await start_requests(case)
        await case.engine.suspend("continue")
        late = asyncio.create_task(case.engine.generate(case.request(4)))
        ids, seen = dict.fromkeys([request.id for request in requests], 0), None
        while seen != (seen := [len(partial) for partial in case.engine.progress(ids).values()]):
            await asyncio.sleep(0.3)  # reports of earlier tokens arrive within this time
        assert not all(task.done() for task in tasks), "no request may end by itself between suspend and resume"
        assert not late.done(), "no token may be generated between suspend and resume"
        await case.engine.resume()
        for generation in await asyncio.gather(*tasks, late):
            check(generation)
            assert generation.ending in (StopReason.STOP, StopReason.LENGTH)

    async def test_running_requests_continue_with_the_new_weights(self, case: EngineCase) -> None:
        before = case.engine.version
        _, tasks = await start_requests(case)
        await case.engine.suspend("continue")
        version = await case.update()
        assert case.engine.version == version, "after update(v) the version must be v"
        await case.engine.resume()
        generations = await asyncio.gather(*tasks)
        both = [g for g in generations if set(g.versions) == {before, version}]
        assert both, "no response spans the update"
        for generation in generations:
            check(generation)
            assert set(generation.versions) <= {before, version}, "a token must have the version of its weights"

    async def test_tokens_after_an_update_use_only_the_new_weights(self, case: EngineCase) -> None:
        if case.reference is None:
            pytest.skip("the case has no reference model")
        requests, tasks = await start_requests(case)  # a single request might end early
        await case.engine.suspend("continue")
        version = await case.update()
        probe = await case.engine.logprobs(range(3, 43))  # new weights can be probed before they are used
        assert probe == pytest.approx(case.reference.logprobs(version, range(3, 43)), abs=1e-4)
        await case.engine.resume()
        spanning = 0
        for request, generation in zip(requests, await asyncio.gather(*tasks), strict=True):
            new = generation.versions.count(version)
            if new:
                spanning += 1
                expected = case.reference.logprobs(version, request.prompt.tokens + generation.tokens)
                assert generation.logprobs[-new:] == pytest.approx(expected[-new:], abs=1e-4)
        assert spanning, "no response went on after the update"

    async def test_engine_restart_aborts_running_requests(self, case: EngineCase) -> None:
        _, tasks = await start_requests(case)
        await case.engine.suspend("restart")
        generations = await asyncio.wait_for(asyncio.gather(*tasks), case.hang_seconds)
        endings = {generation.ending for generation in generations}
        assert StopReason.ABORTED in endings, 'suspend("restart") must end running requests as ABORTED'
        assert endings <= {StopReason.ABORTED, StopReason.STOP, StopReason.LENGTH}
        for generation in generations:
            check(generation)
        await case.update()
        await case.engine.resume()
        check(await case.engine.generate(case.request()))

    async def test_abort_returns_the_tokens_so_far(self, case: EngineCase) -> None:
        requests, tasks = await start_requests(case, 4)
        await case.engine.abort([request.id for request in requests[:2]] + ["unknown"])
        aborted = await asyncio.wait_for(asyncio.gather(*tasks[:2]), case.hang_seconds)
        for generation in aborted:
            check(generation)
            assert len(generation.tokens) < LONG, "`abort` must end a request at once, with the tokens so far"
        endings = {generation.ending for generation in aborted}
        assert StopReason.ABORTED in endings, "an aborted request must end as ABORTED"
        for generation in await asyncio.gather(*tasks[2:]):
            assert generation.ending in (StopReason.STOP, StopReason.LENGTH)

    async def test_abort_never_arrives_before_its_request(self, case: EngineCase) -> None:
        request = case.request(LONG)
        task = asyncio.create_task(case.engine.generate(request))
        await asyncio.sleep(0)
        await case.engine.abort([request.id])
        generation = await asyncio.wait_for(task, case.hang_seconds)
        assert generation.ending is StopReason.ABORTED or len(generation.tokens) < LONG, (
            "an abort must not overtake the request that it aborts"
        )

    async def test_engine_answers_requests_after_a_cancelled_call(self, case: EngineCase) -> None:
        _, tasks = await start_requests(case, 4)
        for task in tasks[:2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        check(await case.engine.generate(case.request()))

    async def test_progress_of_a_request_is_a_prefix_of_its_response(self, case: EngineCase) -> None:
        requests, tasks = await start_requests(case)
        ids = [request.id for request in requests]
        whole, later = (case.engine.progress(dict.fromkeys([*ids, "unknown"], since)) for since in (0, 2))
        assert "unknown" not in whole, "`progress` must leave out requests that are not running"
        generations = {generation.id: generation for generation in await asyncio.gather(*tasks)}
        for id, partial in whole.items():
            assert partial == begin_of(generations[id], len(partial)), "progress must be the beginning of the answer"
            assert len(partial) < len(generations[id].tokens)
            assert later[id] == begin_of(generations[id], 2 + len(later[id])).after(2)
        assert case.engine.progress(dict.fromkeys(ids, 0)) == {}

    async def test_response_continues_from_a_given_prefix(self, case: EngineCase) -> None:
        requests = [case.request(LONG) for _ in range(4)]
        made = await asyncio.gather(*map(case.engine.generate, requests))
        request, whole = max(zip(requests, made, strict=True), key=lambda pair: len(pair[1].tokens))
        length, now = len(whole.tokens), case.engine.version
        for cut in (1, length // 2, length - 1):
            old = replace(begin_of(whole, cut), versions=Int32s.of((now - 1,) * (cut // 2) + (now,) * (cut - cut // 2)))
            task = asyncio.create_task(case.engine.generate(replace(request, id=f"cut-{cut}", prefix=old)))
            shown: list[TokenSpan] = []
            while not task.done():
                shown += case.engine.progress({f"cut-{cut}": 0}).values()
                await asyncio.sleep(0.002)
            generation = task.result()
            assert all(partial == begin_of(generation, len(partial)) for partial in shown)
            check(generation)
            assert begin_of(generation, cut) == old, "the tokens of a prefix must stay as they were sampled"
            assert len(generation.tokens) > cut
            assert set(generation.versions[cut:]) == {now}
            assert generation.ending is StopReason.STOP or len(generation.tokens) == request.max_new_tokens
            if case.reference is not None:
                expected = case.reference.logprobs(now, request.prompt.tokens + generation.tokens)
                assert generation.logprobs[cut:] == pytest.approx(expected[request.prompt.length - 1 + cut :], abs=1e-4)
            else:
                assert generation.tokens == whole.tokens

    @pytest.mark.parametrize("length", [1, 2, 3])
    async def test_response_ends_at_its_first_stop_string(self, case: EngineCase, length: int) -> None:
        """The same holds for a response that continues on another engine, even if the prefix ends within the stop
        string.
        """
        request = case.request(40, temperature=1.0 if case.reference is None else 0.0)
        whole = await case.engine.generate(request)
        place = len(whole.tokens) // 2
        stop = "".join(map(case.letter, whole.tokens[place : place + length]))
        end = first_stop(case, whole.tokens, stop)
        assert end is not None
        stopped = replace(request, id=f"{request.id}-stop", stop=("not in it", stop))
        found = await case.engine.generate(stopped)
        assert (found.tokens, found.ending) == (whole.tokens[:end], StopReason.STOP), (
            "a response must end with STOP at the token that completes a stop string"
        )
        assert found.logprobs == pytest.approx(whole.logprobs[:end], abs=1e-4)
        for cut in {1, end // 2, end - 1} & set(range(1, end)):
            rest = replace(stopped, id=f"{stopped.id}-{cut}", prefix=begin_of(whole, cut))
            found = await case.engine.generate(rest)
            assert (found.tokens, found.ending) == (whole.tokens[:end], StopReason.STOP)
        spared = await case.engine.generate(replace(request, id=f"{request.id}-spared", stop=("not in it",)))
        assert (spared.tokens, spared.ending) == (whole.tokens, whole.ending)

    async def test_engine_takes_more_requests_than_slots(self, case: EngineCase) -> None:
        requests = [case.request(2) for _ in range(600)]
        generations = await asyncio.gather(*map(case.engine.generate, requests))
        assert [generation.id for generation in generations] == [request.id for request in requests]

    async def test_engine_death_fails_every_waiting_call(self, case: EngineCase) -> None:
        """The test kills the engine, so no other test of the engine may follow: this test is the last of the class."""
        requests, tasks = await start_requests(case)
        ids = [request.id for request in requests]
        case.engine.check()
        before = case.engine.progress(dict.fromkeys(ids, 0))
        await case.kill(case.engine)
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), case.hang_seconds)
        with assert_raises(EngineFailed, "`check` of a dead engine must raise EngineFailed"):
            case.engine.check()
        after = case.engine.progress(dict.fromkeys(ids, 0))
        assert any(after.values())
        for id, partial in after.items():
            assert partial.tokens[: len(before[id])] == before[id].tokens
            assert len(partial) == len(partial.logprobs) == len(partial.versions)
        assert any(isinstance(outcome, EngineFailed) for outcome in outcomes), (
            "calls that wait must raise EngineFailed when the engine dies"
        )
        assert all(isinstance(outcome, EngineFailed | Generation) for outcome in outcomes)
        calls: list[Awaitable[object]] = [
            case.engine.generate(case.request()),
            case.engine.suspend("continue"),
            case.engine.update(99, case.weights(0)),
            case.engine.resume(),
            case.engine.logprobs([3, 4, 5]),
            case.engine.abort(["x"]),
        ]
        for call in calls:
            with assert_raises(EngineFailed, "a dead engine must raise EngineFailed from every call"):
                await asyncio.wait_for(call, case.hang_seconds)
