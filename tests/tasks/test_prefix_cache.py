"""vLLM's prefix cache: a prompt is computed once per policy version, and its cache is never used with other weights."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import StopReason
from rollflow.tasks.engines.base import Generation, GenerationRequest
from rollflow.tasks.engines.config import VllmEngineConfig
from rollflow.tasks.engines.runnable import CPU_BLOCK_TOKENS
from rollflow.tasks.engines.vllm.engine import VllmEngine
from tests.support.tiny_policy import greedy_tokens, make_policy, make_weights, reference_logprobs

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]

PROMPT = tuple(3 + (7 * place) % 300 for place in range(3 * CPU_BLOCK_TOKENS + 5))
NUMBERS = itertools.count()
CHANGED = (2, *PROMPT[1:])  # the same prompt, but for its first token


async def test_cached_prompt_of_an_old_policy_version_is_never_used(tmp_path: Path) -> None:
    """Requests that continue across the update also leave only values of the new weights in the cache."""
    weights = [make_weights(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    engine = VllmEngine(VllmEngineConfig(), make_policy(tmp_path / "policy"))
    await engine.start()
    try:
        going_on: list[asyncio.Task[Generation]] = []
        for version in range(4):
            await engine.suspend("continue")
            late = [asyncio.ensure_future(engine.generate(request(PROMPT, f"late {version}")))] if version else []
            await asyncio.sleep(0.05)  # the request reaches the engine before the update
            await engine.update(version, weights[version % 2])
            await engine.resume()
            first, *others = await asked(engine, [PROMPT] * 6, version)
            assert min(made.cached for made in others) >= 3 * CPU_BLOCK_TOKENS
            again = await asked(engine, [PROMPT] * 2, version)
            assert {made.cached for made in again} == {3 * CPU_BLOCK_TOKENS}
            changed = await asked(engine, [CHANGED], version)
            assert changed[0].cached == 0
            for made in (first, *others, *again, *[await each for each in late]):
                check(made, PROMPT, weights[version % 2])
            check(changed[0], CHANGED, weights[version % 2])
            for made in await asyncio.gather(*going_on):
                new = made.versions.count(version)
                expected = reference_logprobs(weights[version % 2], PROMPT + made.tokens)
                assert made.logprobs[len(made.tokens) - new :] == pytest.approx(
                    expected[-new:] if new else [], abs=1e-4
                )
            greedy = await engine.generate(request(PROMPT, f"greedy {version}", temperature=0.0))
            assert list(greedy.tokens) == greedy_tokens(weights[version % 2], PROMPT, len(greedy.tokens))
            going_on = await started(engine, version)
    finally:
        await engine.close()


def request(prompt: Sequence[int], id: str, longest: int = 8, temperature: float = 1.0) -> GenerationRequest:
    return GenerationRequest(id, ModelInput.of(tuple(prompt)), longest, temperature)


async def asked(engine: VllmEngine, prompts: Sequence[Sequence[int]], version: int) -> list[Generation]:
    requests = [request(prompt, f"{version} {next(NUMBERS)}") for prompt in prompts]
    return list(await asyncio.gather(*map(engine.generate, requests)))


async def started(engine: VllmEngine, version: int) -> list[asyncio.Task[Generation]]:
    """Start long responses to the prompt, and let them run for a while."""
    requests = [request(PROMPT, f"long {version} {place}", 140) for place in range(8)]
    tasks = [asyncio.create_task(engine.generate(each)) for each in requests]
    async with asyncio.timeout(60):
        while not any(engine.progress(dict.fromkeys([each.id for each in requests], 4)).values()):
            await asyncio.sleep(0.005)
    assert not all(task.done() for task in tasks)
    return tasks


def check(made: Generation, prompt: Sequence[int], weights: Path) -> None:
    expected = reference_logprobs(weights, (*prompt, *made.tokens))
    assert made.logprobs == pytest.approx(expected[len(prompt) - 1 :], abs=1e-4)
    assert made.ending in (StopReason.STOP, StopReason.LENGTH)
