"""The engine contract (`rollflow.testing.engines`), tested on every engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import ray

from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.actors.engine_client import RayEngine
from rollflow.tasks.engines import build_engine
from rollflow.tasks.engines.base import Engine
from rollflow.tasks.engines.config import EngineConfig, TimedEngineConfig, TransformersEngineConfig, VllmEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.engines.vllm.engine import VllmEngine
from rollflow.testing.engines import EngineCase, EngineContract, open_case
from tests.support.cores import core
from tests.support.here import Here
from tests.support.tiny_policy import (
    EOS,
    greedy_rows,
    greedy_tokens,
    letter,
    make_letters,
    make_policy,
    make_weights,
    reference_logprobs,
)
from tests.support.waiting import HANG_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]

CONFIGS: dict[str, EngineConfig] = {
    "timed": TimedEngineConfig(median_tokens=400, sigma=0, seconds_per_token=0.005, update_seconds=0.0),
    # this engine generates slower, because a busy machine reports the tokens of an actor late
    "ray-timed": TimedEngineConfig(median_tokens=400, sigma=0, seconds_per_token=0.01, update_seconds=0.0),
    "transformers": TransformersEngineConfig(),
    "ray-transformers": TransformersEngineConfig(),
    "vllm": VllmEngineConfig(),
    "vllm-ngram": VllmEngineConfig(speculation="ngram"),
    "vllm-suffix": VllmEngineConfig(speculation="suffix"),
}
SOAKED = [pytest.param("ray-transformers", marks=pytest.mark.soak)]
KINDS = ["timed", "transformers", "ray-timed", *SOAKED, "vllm", "vllm-ngram", "vllm-suffix"]
LONG = 200


@dataclass(frozen=True)
class TinyPolicy:
    """A tiny policy with two sets of weights, one for even and one for odd versions; transformers computes the expected
    log-probs.
    """

    folder: Path

    def weights(self, version: int) -> Path:
        return self.folder / f"weights-{version % 2}"

    def logprobs(self, version: int, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        return reference_logprobs(self.weights(version), tokens, temperature)

    def greedy(self, version: int, prompt: Sequence[int], count: int) -> list[int]:
        return greedy_tokens(self.weights(version), prompt, count)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    make_policy(folder / "policy")
    make_letters(folder / "policy")
    for parity in (0, 1):
        make_weights(folder / f"weights-{parity}", seed=parity)
    return folder


def build(kind: str, folder: Path, request: pytest.FixtureRequest) -> Engine:
    config = CONFIGS[kind]
    if kind.startswith("ray-"):
        request.getfixturevalue("ray_node")
        return RayEngine.spawn(config, folder / "policy")
    return build_engine(config, folder / "policy")


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
    "vllm-ngram": kill_engine_core,
    "vllm-suffix": kill_engine_core,
}


class TestEngines(EngineContract):
    """The engine contract, tested on each engine; engines with a name that begins with `ray` are Ray actors."""

    foreign = r"^the \w+ engine reads tokens alone, but .* kind 'image' at position 2 "

    @pytest_asyncio.fixture(scope="class", loop_scope="class", params=KINDS)
    @classmethod
    async def case(cls, request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[EngineCase]:
        kind, policy = request.param, TinyPolicy(folder)
        engine = build(kind, folder, request)
        is_remote, has_model = isinstance(engine, RayEngine), "timed" not in kind
        case = EngineCase(
            engine,
            weights=(lambda version: Here(policy.weights(version))) if is_remote else policy.weights,
            reference=policy if has_model else None,
            eos=EOS if has_model else None,
            letter=letter,
            kill=KILLERS[kind],
            hang_seconds=HANG_SECONDS,
        )
        async with open_case(case):
            if kind == "vllm-suffix":
                await remember_probable_answers(engine, policy)
            yield case


async def remember_probable_answers(engine: Engine, policy: TinyPolicy) -> None:
    """Store the most probable response of each version to each prompt of the contract, so that the engine drafts from
    it.
    """
    assert isinstance(engine, VllmEngine)
    prompts = [(3 + number, 7, 11) for number in range(50)]
    for version in (0, 1):
        rows = zip(prompts, greedy_rows(policy.weights(version), prompts, 40), strict=True)
        await engine.remember([(Int32s.of(prompt).data, Int32s.of(tokens).data) for prompt, tokens in rows])
