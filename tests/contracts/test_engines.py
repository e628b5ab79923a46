"""The engine contract: each sentence of `tasks/engines/base.py` is tested on every engine."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import ray

from rollflow.storage.errors import ConfigError, EngineFailed
from rollflow.storage.model_input import ForeignPart, ModelInput
from rollflow.storage.records import StopReason
from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.actors.engine_client import RayEngine
from rollflow.tasks.engines import build_engine
from rollflow.tasks.engines.base import Engine, Generation, GenerationRequest, TokenSpan
from rollflow.tasks.engines.config import EngineConfig, TimedEngineConfig, TransformersEngineConfig, VllmEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from tests.support.cores import core
from tests.support.here import Here
from tests.support.tiny_policy import (
    EOS,
    greedy_tokens,
    letter,
    make_letters,
    make_policy,
    make_weights,
    reference_logprobs,
)
from tests.support.waiting import HANG_SECONDS, soon

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow, pytest.mark.xdist_group("vllm")]

CONFIGS: dict[str, EngineConfig] = {
    "timed": TimedEngineConfig(median_tokens=400, sigma=0, seconds_per_token=0.01, update_seconds=0.0),
    "transformers": TransformersEngineConfig(),
    "vllm": VllmEngineConfig(),
}
KINDS = ["timed", "transformers", "ray-timed", "ray-transformers", "vllm"]
LONG = 200


@dataclass
class Case:
    """An engine under test that has version 0, with the requests and weights that tests need."""

    engine: Engine
    folder: Path
    has_model: bool
    versions: int = 0
    ids: int = 0

    def request(self, max_new_tokens: int = 8, *, temperature: float = 1.0) -> GenerationRequest:
        self.ids += 1
        prompt = ModelInput.of((3 + self.ids % 50, 7, 11))
        return GenerationRequest(f"request-{self.ids}", prompt, max_new_tokens, temperature, seed=self.ids)

    def weights(self, version: int) -> Path:
        """Return the weights of a version; even and odd versions have different weights."""
        return self.folder / f"weights-{version % 2}"

    def taken(self, version: int) -> Path | Here:
        """Return the weights of a version in the form that the engine expects."""
        return Here(self.weights(version)) if isinstance(self.engine, RayEngine) else self.weights(version)

    async def update(self) -> int:
        self.versions += 1
        await self.engine.update(self.versions, self.taken(self.versions))
        return self.versions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    make_policy(folder / "policy")
    make_letters(folder / "policy")
    for parity in (0, 1):
        make_weights(folder / f"weights-{parity}", seed=parity)
    return folder


def build(kind: str, folder: Path, request: pytest.FixtureRequest) -> Engine:
    config = CONFIGS[kind.removeprefix("ray-")]
    if kind.startswith("ray-"):
        request.getfixturevalue("ray_node")
        return RayEngine.spawn(config, folder / "policy")
    return build_engine(config, folder / "policy")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def case(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Case]:
    engine = build(request.param, folder, request)
    case = Case(engine, folder, has_model="timed" not in request.param)
    await engine.start()
    assert engine.version == -1
    await engine.suspend("continue")
    await engine.update(0, case.taken(0))
    await engine.resume()
    yield case
    await engine.close()


async def started(case: Case, count: int = 8) -> tuple[list[GenerationRequest], list[asyncio.Task[Generation]]]:
    """Start requests with long responses, and wait until the engine has reported some tokens."""
    requests = [case.request(LONG) for _ in range(count)]
    tasks = [asyncio.create_task(case.engine.generate(request)) for request in requests]
    ids = {request.id: 2 for request in requests}
    await soon(lambda: any(case.engine.progress(ids).values()))
    return requests, tasks


def beginning(generation: Generation, count: int) -> TokenSpan:
    return generation.made.before(count)


def check(generation: Generation) -> None:
    assert len(generation.tokens) == len(generation.logprobs) == len(generation.versions)
    assert list(generation.versions) == sorted(generation.versions)
    assert all(logprob <= 0 for logprob in generation.logprobs)


async def test_foreign_part_is_refused_alone(case: Case) -> None:
    """An engine that reads tokens alone names the part in one sentence, and other requests go on."""
    mixed = ModelInput.from_parts([Int32s.of((3, 7)), ForeignPart("image", "5e" * 32, 4), Int32s.of((11,))])
    asked = replace(case.request(), prompt=mixed), case.request()
    refused, generation = await asyncio.gather(*map(case.engine.generate, asked), return_exceptions=True)
    assert isinstance(refused, ConfigError)
    assert re.match(r"the \w+ engine reads tokens alone, but .* kind 'image' at position 2 ", str(refused))
    assert isinstance(generation, Generation)
    check(generation)


async def test_generation_has_the_version_in_use(case: Case) -> None:
    requests = [case.request(LONG if i == 0 else 4 + i) for i in range(20)]
    generations = await asyncio.gather(*map(case.engine.generate, requests))
    for request, generation in zip(requests, generations, strict=True):
        check(generation)
        assert generation.id == request.id
        assert set(generation.versions) == {case.engine.version}
        if generation.ending is StopReason.LENGTH:
            assert len(generation.tokens) == request.max_new_tokens
        else:
            assert generation.ending is StopReason.STOP
            assert generation.tokens[-1] == EOS or not case.has_model


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_are_of_the_sampling_distribution(case: Case, temperature: float) -> None:
    if not case.has_model:
        pytest.skip("no model")
    request = case.request(40, temperature=temperature)
    generation = await case.engine.generate(request)
    weights = case.weights(case.engine.version)
    expected = reference_logprobs(weights, request.prompt.tokens + generation.tokens, temperature)
    assert generation.logprobs == pytest.approx(expected[request.prompt.length - 1 :], abs=1e-4)


async def test_temperature_zero_is_greedy(case: Case) -> None:
    if not case.has_model:
        pytest.skip("no model")
    requests = [case.request(12, temperature=0.0) for _ in range(3)]
    weights = case.weights(case.engine.version)
    for request, generation in zip(requests, await asyncio.gather(*map(case.engine.generate, requests)), strict=True):
        assert list(generation.tokens) == greedy_tokens(weights, request.prompt.tokens, len(generation.tokens))
        expected = reference_logprobs(weights, request.prompt.tokens + generation.tokens)
        assert generation.logprobs == pytest.approx(expected[request.prompt.length - 1 :], abs=1e-4)


async def test_probe_logprobs_agree_with_the_model(case: Case) -> None:
    tokens = tuple(range(3, 43))
    answer = await case.engine.logprobs(tokens)
    if not case.has_model:
        assert answer is None
        return
    expected = reference_logprobs(case.weights(case.engine.version), tokens)
    assert answer == pytest.approx(expected, abs=1e-4)


async def test_no_token_between_suspend_and_resume(case: Case) -> None:
    requests, tasks = await started(case)
    await case.engine.suspend("continue")
    late = asyncio.create_task(case.engine.generate(case.request(4)))
    ids, seen = dict.fromkeys([request.id for request in requests], 0), None
    while seen != (seen := [len(partial) for partial in case.engine.progress(ids).values()]):
        await asyncio.sleep(0.3)  # reports of earlier tokens arrive within this time
    assert not all(task.done() for task in tasks)
    assert not late.done()
    await case.engine.resume()
    for generation in await asyncio.gather(*tasks, late):
        check(generation)
        assert generation.ending in (StopReason.STOP, StopReason.LENGTH)


async def test_running_requests_continue_with_the_new_weights(case: Case) -> None:
    before = case.engine.version
    _, tasks = await started(case)
    await case.engine.suspend("continue")
    version = await case.update()
    assert case.engine.version == version
    await case.engine.resume()
    generations = await asyncio.gather(*tasks)
    both = [g for g in generations if set(g.versions) == {before, version}]
    assert both, "no response spans the update"
    for generation in generations:
        check(generation)
        assert set(generation.versions) <= {before, version}


async def test_tokens_after_an_update_use_only_the_new_weights(case: Case) -> None:
    if not case.has_model:
        pytest.skip("no model")
    requests, tasks = await started(case)  # a single request might end early
    await case.engine.suspend("continue")
    version = await case.update()
    probe = await case.engine.logprobs(range(3, 43))  # new weights can be probed before they are used
    assert probe == pytest.approx(reference_logprobs(case.weights(version), range(3, 43)), abs=1e-4)
    await case.engine.resume()
    spanning = 0
    for request, generation in zip(requests, await asyncio.gather(*tasks), strict=True):
        new = generation.versions.count(version)
        if new:
            spanning += 1
            expected = reference_logprobs(case.weights(version), request.prompt.tokens + generation.tokens)
            assert generation.logprobs[-new:] == pytest.approx(expected[-new:], abs=1e-4)
    assert spanning, "no response went on after the update"


async def test_restart_aborts_running_requests(case: Case) -> None:
    _, tasks = await started(case)
    await case.engine.suspend("restart")
    generations = await asyncio.wait_for(asyncio.gather(*tasks), HANG_SECONDS)
    assert StopReason.ABORTED in {generation.ending for generation in generations}
    assert {generation.ending for generation in generations} <= {StopReason.ABORTED, StopReason.STOP, StopReason.LENGTH}
    for generation in generations:
        check(generation)
    await case.update()
    await case.engine.resume()
    check(await case.engine.generate(case.request()))


async def test_abort_returns_the_tokens_so_far(case: Case) -> None:
    requests, tasks = await started(case, 4)
    await case.engine.abort([request.id for request in requests[:2]] + ["unknown"])
    aborted = await asyncio.wait_for(asyncio.gather(*tasks[:2]), HANG_SECONDS)
    for generation in aborted:
        check(generation)
        assert len(generation.tokens) < LONG
    assert StopReason.ABORTED in {generation.ending for generation in aborted}
    for generation in await asyncio.gather(*tasks[2:]):
        assert generation.ending in (StopReason.STOP, StopReason.LENGTH)


async def test_abort_never_overtakes_its_request(case: Case) -> None:
    request = case.request(LONG)
    task = asyncio.create_task(case.engine.generate(request))
    await asyncio.sleep(0)
    await case.engine.abort([request.id])
    generation = await asyncio.wait_for(task, HANG_SECONDS)
    assert generation.ending is StopReason.ABORTED or len(generation.tokens) < LONG


async def test_engine_works_after_a_cancelled_call(case: Case) -> None:
    _, tasks = await started(case, 4)
    for task in tasks[:2]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    check(await case.engine.generate(case.request()))


async def test_progress_is_the_beginning_of_the_answer(case: Case) -> None:
    requests, tasks = await started(case)
    ids = [request.id for request in requests]
    whole, later = (case.engine.progress(dict.fromkeys([*ids, "unknown"], since)) for since in (0, 2))
    assert "unknown" not in whole
    generations = {generation.id: generation for generation in await asyncio.gather(*tasks)}
    for id, partial in whole.items():
        assert partial == beginning(generations[id], len(partial))
        assert len(partial) < len(generations[id].tokens)
        assert later[id] == beginning(generations[id], 2 + len(later[id])).after(2)
    assert case.engine.progress(dict.fromkeys(ids, 0)) == {}


async def test_answer_continues_from_its_prefix(case: Case) -> None:
    requests = [case.request(LONG) for _ in range(4)]
    made = await asyncio.gather(*map(case.engine.generate, requests))
    request, whole = max(zip(requests, made, strict=True), key=lambda pair: len(pair[1].tokens))
    length, now = len(whole.tokens), case.engine.version
    for cut in (1, length // 2, length - 1):
        old = replace(beginning(whole, cut), versions=Int32s.of((now - 1,) * (cut // 2) + (now,) * (cut - cut // 2)))
        task = asyncio.create_task(case.engine.generate(replace(request, id=f"cut-{cut}", prefix=old)))
        shown: list[TokenSpan] = []
        while not task.done():
            shown += case.engine.progress({f"cut-{cut}": 0}).values()
            await asyncio.sleep(0.002)
        generation = task.result()
        assert all(partial == beginning(generation, len(partial)) for partial in shown)
        check(generation)
        assert beginning(generation, cut) == old
        assert len(generation.tokens) > cut
        assert set(generation.versions[cut:]) == {now}
        assert generation.ending is StopReason.STOP or len(generation.tokens) == request.max_new_tokens
        if case.has_model:
            expected = reference_logprobs(case.weights(now), request.prompt.tokens + generation.tokens)
            assert generation.logprobs[cut:] == pytest.approx(expected[request.prompt.length - 1 + cut :], abs=1e-4)
        else:
            assert generation.tokens == whole.tokens


def first_stop(tokens: Sequence[int], stop: str) -> int | None:
    """Return the length of the shortest beginning that contains the stop string."""
    found = (count for count in range(len(tokens) + 1) if stop in "".join(map(letter, tokens[:count])))
    return next(found, None)


@pytest.mark.parametrize("length", [1, 2, 3])
async def test_response_ends_at_its_first_stop_string(case: Case, length: int) -> None:
    """The same holds for a response that continues on another engine, even if its prefix cuts the stop string."""
    request = case.request(40, temperature=0.0 if case.has_model else 1.0)
    whole = await case.engine.generate(request)
    place = len(whole.tokens) // 2
    stop = "".join(map(letter, whole.tokens[place : place + length]))
    end = first_stop(whole.tokens, stop)
    assert end is not None
    stopped = replace(request, id=f"{request.id}-stop", stop=("not in it", stop))
    found = await case.engine.generate(stopped)
    assert (found.tokens, found.ending) == (whole.tokens[:end], StopReason.STOP)
    assert found.logprobs == pytest.approx(whole.logprobs[:end], abs=1e-4)
    for cut in {1, end // 2, end - 1} & set(range(1, end)):
        rest = replace(stopped, id=f"{stopped.id}-{cut}", prefix=beginning(whole, cut))
        found = await case.engine.generate(rest)
        assert (found.tokens, found.ending) == (whole.tokens[:end], StopReason.STOP)
    spared = await case.engine.generate(replace(request, id=f"{request.id}-spared", stop=("not in it",)))
    assert (spared.tokens, spared.ending) == (whole.tokens, whole.ending)


async def test_engine_takes_more_requests_than_slots(case: Case) -> None:
    requests = [case.request(2) for _ in range(600)]
    generations = await asyncio.gather(*map(case.engine.generate, requests))
    assert [generation.id for generation in generations] == [request.id for request in requests]


async def test_death_reaches_every_call(case: Case, request: pytest.FixtureRequest) -> None:
    """The test kills the engine, so no other test of the engine may follow."""
    requests, tasks = await started(case)
    ids = [request.id for request in requests]
    case.engine.check()
    before = case.engine.progress(dict.fromkeys(ids, 0))
    await KILLERS[request.node.callspec.params["case"]](case.engine)
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), HANG_SECONDS)
    with pytest.raises(EngineFailed):
        case.engine.check()
    after = case.engine.progress(dict.fromkeys(ids, 0))
    assert any(after.values())
    for id, partial in after.items():
        assert partial.tokens[: len(before[id])] == before[id].tokens
        assert len(partial) == len(partial.logprobs) == len(partial.versions)
    assert any(isinstance(outcome, EngineFailed) for outcome in outcomes)
    assert all(isinstance(outcome, EngineFailed | Generation) for outcome in outcomes)
    calls: list[Awaitable[object]] = [
        case.engine.generate(case.request()),
        case.engine.suspend("continue"),
        case.engine.update(99, case.taken(0)),
        case.engine.resume(),
        case.engine.logprobs([3, 4, 5]),
        case.engine.abort(["x"]),
    ]
    for call in calls:
        with pytest.raises(EngineFailed):
            await asyncio.wait_for(call, HANG_SECONDS)


async def kill_timed(engine: Engine) -> None:
    assert isinstance(engine, TimedEngine)
    engine.kill()


async def kill_actor(engine: Engine) -> None:
    assert isinstance(engine, RayEngine)
    ray.kill(engine.actor)


async def kill_engine_core(engine: Engine) -> None:
    core(psutil.Process()).kill()


async def close(engine: Engine) -> None:
    await engine.close()


KILLERS: dict[str, Callable[[Engine], Awaitable[None]]] = {
    "timed": kill_timed,
    "transformers": close,
    "ray-timed": kill_actor,
    "ray-transformers": kill_actor,
    "vllm": kill_engine_core,
}
