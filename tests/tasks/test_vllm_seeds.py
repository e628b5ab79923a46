"""vLLM repeats the draws of a seeded request: alone, among many requests, and after an update."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import StopReason
from rollflow.tasks.actors.run_engines import build_run_engine
from rollflow.tasks.engines.base import Generation, GenerationRequest, TokenSpan
from rollflow.tasks.engines.config import VllmEngineConfig
from rollflow.tasks.engines.vllm.engine import VllmEngine
from rollflow.tasks.rollout.config import RolloutConfig
from rollflow.tasks.run.config import RunConfig
from tests.support.tiny_policy import make_policy, make_weights

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]

NOTHING = TokenSpan()
NUMBERS = itertools.count()
PROMPTS = [tuple(3 + (7 * place + group) % 300 for place in range(40)) for group in range(4)]
CROWD = tuple(3 + place % 300 for place in range(200))  # 60 of them are more tokens than vLLM computes in one step


async def test_repeated_request_draws_the_same_tokens(tmp_path: Path) -> None:
    engine = VllmEngine(VllmEngineConfig(prefix_caching=False), make_policy(tmp_path / "policy"), seeded=True)
    await engine.start()
    try:
        await load(engine, tmp_path / "weights", 0)
        first = [await ask(engine, prompt, seed) for seed, prompt in enumerate(PROMPTS)]
        assert len({made.tokens for made in first}) == len(PROMPTS)
        other = [await ask(engine, prompt, 100 + seed) for seed, prompt in enumerate(PROMPTS)]
        assert all(made.tokens != again.tokens for made, again in zip(first, other, strict=True))
        crowd = [asyncio.create_task(ask(engine, (*CROWD, 3 + number), number)) for number in range(60)]
        among = [asyncio.create_task(ask(engine, prompt, seed)) for seed, prompt in enumerate(PROMPTS)]
        await asyncio.sleep(0.3)
        await load(engine, tmp_path / "weights", 1)  # all running requests are recomputed, each prompt in one step
        assert [made.tokens for made in await asyncio.gather(*among)] == [made.tokens for made in first]
        assert StopReason.ABORTED not in {made.ending for made in await asyncio.gather(*crowd)}
        await goes_on(engine, first[0])
    finally:
        await engine.close()


async def goes_on(engine: VllmEngine, whole: Generation) -> None:
    """With a prefix from another engine, a response's random numbers differ; the same ones would repeat a token."""
    twelve = whole.made.before(12)
    on = [await ask(engine, PROMPTS[0], 0, twelve) for _ in range(2)]
    assert on[0].tokens == on[1].tokens != whole.tokens


def test_run_that_may_discard_responses_seeds_its_engines() -> None:
    assert not RolloutConfig().leaves_behind
    assert RolloutConfig(redundant_groups=2).leaves_behind
    assert RolloutConfig(on_stale="drop").leaves_behind
    assert RolloutConfig(tail_batching=True, on_stale="wait").leaves_behind


@pytest.mark.parametrize("rollout", [RolloutConfig(), RolloutConfig(on_stale="drop")])
def test_vllm_engines_of_a_run_use_seeds_if_needed(tmp_path: Path, rollout: RolloutConfig) -> None:
    config, folder = RunConfig(rollout=rollout), make_policy(tmp_path / "policy")
    context: Any = SimpleNamespace(config=config, policy_folder=folder, run_id="seeds")
    engine = build_run_engine(context, config.engine)
    assert isinstance(engine, VllmEngine)
    request = GenerationRequest("a", ModelInput.of((3,)), 8, seed=5)
    assert engine._derive_seed(request) == (5 if rollout.leaves_behind else None)


async def ask(engine: VllmEngine, prompt: tuple[int, ...], seed: int, prefix: TokenSpan = NOTHING) -> Generation:
    return await engine.generate(GenerationRequest(f"{next(NUMBERS)}", ModelInput.of(prompt), 32, 1.0, seed, prefix))


async def load(engine: VllmEngine, folder: Path, version: int) -> None:
    await engine.suspend("continue")
    await engine.update(version, make_weights(folder, seed=0))
    await engine.resume()
