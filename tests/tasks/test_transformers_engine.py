"""A response of the transformers engine is a function of its request and the weights, bit for bit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file

from rollflow.storage.errors import Corrupt
from rollflow.storage.model_input import ModelInput
from rollflow.tasks.engines.base import Generation, GenerationRequest
from rollflow.tasks.engines.config import TransformersEngineConfig
from rollflow.tasks.engines.transformers import TransformersEngine
from tests.support.tiny_policy import make_policy, make_weights
from tests.support.waiting import soon

REQUESTS = [
    # prompts shorter, longer than and equal to a prefill chunk (16); spans of 64 and 128 keys
    GenerationRequest(
        f"r{i}", ModelInput.of(tuple(3 + (7 * i + 3 * k) % 300 for k in range(1 + 5 * i % 50))), 1 + i % 40, 1.0, seed=i
    )
    for i in range(90)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    make_policy(folder / "policy")
    make_weights(folder / "0", seed=0)
    make_weights(folder / "1", seed=1)
    return folder


@pytest_asyncio.fixture
async def engine(folder: Path) -> AsyncIterator[TransformersEngine]:
    engine = await start(folder)
    yield engine
    await engine.close()


async def start(folder: Path, slots: int = 256) -> TransformersEngine:
    engine = TransformersEngine(TransformersEngineConfig(max_concurrent_requests=slots), folder / "policy")
    await engine.start()
    await engine.suspend("continue")
    await engine.update(0, folder / "0")
    await engine.resume()
    return engine


async def all_at_once(engine: TransformersEngine) -> dict[str, Generation]:
    return {g.id: g for g in await asyncio.gather(*map(engine.generate, REQUESTS))}


@pytest.mark.long
async def test_response_does_not_depend_on_other_requests(engine: TransformersEngine, folder: Path) -> None:
    together = await all_at_once(engine)
    for request in REQUESTS[::5]:
        assert await engine.generate(request) == together[request.id]

    draw = random.Random(0)
    delays = [draw.uniform(0, 0.5) for _ in REQUESTS]

    async def late(request: GenerationRequest, delay: float) -> Generation:
        await asyncio.sleep(delay)
        return await engine.generate(request)

    order = list(zip(REQUESTS, delays, strict=True))
    draw.shuffle(order)
    for generation in await asyncio.gather(*(late(*item) for item in order)):
        assert generation == together[generation.id]

    other = await start(folder, slots=7)
    assert await all_at_once(other) == together
    await other.close()


@pytest.mark.long
async def test_suspension_without_a_weight_update_changes_no_response(engine: TransformersEngine) -> None:
    expected = await all_at_once(engine)
    tasks = [asyncio.create_task(engine.generate(request)) for request in REQUESTS]
    for _ in range(3):
        await asyncio.sleep(0.02)
        await engine.suspend("continue")
        await engine.resume()
    assert {g.id: g for g in await asyncio.gather(*tasks)} == expected


async def test_different_seeds_or_no_seed_give_different_responses(engine: TransformersEngine) -> None:
    def request(id: str, seed: int | None) -> GenerationRequest:
        return GenerationRequest(id, ModelInput.of((5, 6, 7)), 30, 1.0, seed)

    a, b, c, d, e = await asyncio.gather(
        *(engine.generate(request(f"x{i}", seed)) for i, seed in enumerate([1, 1, 2, None, None]))
    )
    assert a.tokens == b.tokens
    assert len({a.tokens, c.tokens, d.tokens, e.tokens}) == 4


async def test_invalid_request_is_refused_and_others_continue(
    engine: TransformersEngine, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="at most 256"):
        await engine.generate(GenerationRequest("long", ModelInput.of((3,) * 250), 10))
    with pytest.raises(ValueError, match="at least one"):
        await engine.generate(GenerationRequest("empty", ModelInput.of(()), 10))
    tensors = load_file(folder / "1" / "model.safetensors")
    name = sorted(tensors)[-1]
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    await engine.suspend("continue")
    with pytest.raises(Corrupt, match=name):
        await engine.update(1, tmp_path)


def continued(whole: Generation, cut: int) -> GenerationRequest:
    """Build the request for another engine after the first one died with `cut` tokens."""
    number = int(whole.id.removeprefix("r"))
    prefix = whole.made.before(cut)
    return replace(REQUESTS[number], prefix=prefix)


@pytest.mark.long
async def test_interrupted_response_continues_elsewhere_bit_for_bit(engine: TransformersEngine, folder: Path) -> None:
    expected = await all_at_once(engine)
    other, draw = await start(folder), random.Random(0)
    for _ in range(3):
        requests = [continued(whole, draw.randrange(len(whole.tokens))) for whole in expected.values()]
        draw.shuffle(requests)
        assert {g.id: g for g in await asyncio.gather(*map(other.generate, requests))} == expected
    await other.close()


@pytest.mark.long
async def test_response_across_an_update_continues_bit_for_bit(engine: TransformersEngine, folder: Path) -> None:
    """Cut a response at any token after the update; the attention state of the older tokens is computed as it was
    then.
    """
    other = await start(folder)
    tasks = [asyncio.create_task(engine.generate(request)) for request in REQUESTS]
    ids = {request.id: 0 for request in REQUESTS}
    await soon(lambda: max(map(len, engine.progress(ids).values()), default=0) >= 10)
    for one in (engine, other):
        await one.suspend("continue")
        await one.update(1, folder / "1")
        await one.resume()
    spanning = [g for g in await asyncio.gather(*tasks) if {*g.versions} == {0, 1}]
    assert len(spanning) > 10
    for cut in (0, 1, 5):
        requests = [continued(g, min(g.versions.index(1) + cut, len(g.tokens) - 1)) for g in spanning]
        assert await asyncio.gather(*map(other.generate, requests)) == spanning
    await other.close()


async def test_weight_update_during_prefill_loses_no_token(engine: TransformersEngine, folder: Path) -> None:
    expected = await all_at_once(engine)
    requests = [continued(whole, len(whole.tokens) - 1) for whole in expected.values() if len(whole.tokens) > 20]
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    ids = {request.id: 0 for request in requests}
    await soon(lambda: max(map(len, engine.progress(ids).values()), default=0) >= 5)
    await engine.suspend("continue")
    await engine.update(1, folder / "1")
    await engine.resume()
    for request, made in zip(requests, await asyncio.gather(*tasks), strict=True):
        cut = len(request.prefix)
        assert made.made.before(cut) == request.prefix
        assert made.versions[cut:] == (1,) * (len(made.tokens) - cut)
