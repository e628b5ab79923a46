"""Tests speculative decoding on vLLM: drafts change neither the distribution of responses nor their log-probabilities.
In a seeded engine, drafts do not change the responses, either.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from rollflow.storage.model_input import ModelInput
from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.engines.base import DraftCounts, Generation, GenerationRequest
from rollflow.tasks.engines.config import VllmEngineConfig
from rollflow.tasks.engines.speculation import PastResponse
from rollflow.tasks.engines.vllm.engine import VllmEngine
from tests.support.tiny_policy import (
    EOS,
    VOCABULARY,
    greedy_rows,
    make_policy,
    make_weights,
    next_chances,
    reference_logprobs,
)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]

NUMBERS = itertools.count()
PROMPTS = [(3 + number, 7, 11) for number in range(8)]
LEAST_P = 1e-4  # a correct engine has a smaller p-value in only one of ten thousand comparisons


# --- the verifier alone -----------------------------------------------------------------------------------------------


def verify(
    verifier: Any,
    logits_TV: torch.Tensor,
    drafts: Sequence[Sequence[int]],
    temperature: float,
    generators: dict[int, torch.Generator],
) -> tuple[list[list[int]], list[list[float]]]:
    """Verify drafts for requests whose position t has logits `logits_TV[t]`; return tokens and log-probs."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    metadata = SpecDecodeMetadata.make_dummy([list(draft) for draft in drafts], torch.device("cpu"))
    logits_RV = torch.cat([logits_TV[: len(draft) + 1] for draft in drafts])
    output = verifier(metadata, None, logits_RV, sampling_of(len(drafts), temperature, generators))
    tokens, logprobs = RejectionSampler.parse_output(
        output.sampled_token_ids, logits_TV.shape[1], (), output.logprobs_tensors
    )
    cuts = [0, *itertools.accumulate(map(len, tokens))]
    return tokens, [logprobs.logprobs[start:end, 0].tolist() for start, end in itertools.pairwise(cuts)]


def sampling_of(requests: int, temperature: float, generators: dict[int, torch.Generator]) -> Any:
    """Build vLLM's sampling parameters of a batch."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    nothing = torch.empty(0)
    return SamplingMetadata(
        temperature=torch.full((requests,), temperature) if temperature else None,
        all_greedy=temperature == 0,
        all_random=temperature > 0,
        top_p=None,
        top_k=None,
        generators=generators,
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing,
        output_token_ids=[[] for _ in range(requests)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


@pytest.fixture(scope="module")
def verifiers() -> dict[str, Any]:
    """Build the verifier of drafts, and a faulty verifier that accepts every drafted token."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import sampler

    from rollflow.tasks.engines.vllm.drafts import DraftVerifier
    from rollflow.tasks.engines.vllm.worker import _skip_ranks

    sampler.batched_count_greater_than = _skip_ranks
    current_platform.import_kernels()

    class AcceptsAll(DraftVerifier):  # type: ignore[misc]
        def forward(self, metadata: Any, draft_probs: Any, logits: Any, sampling_metadata: Any) -> Any:
            made = super().forward(metadata, draft_probs, logits, sampling_metadata)
            most = metadata.max_spec_len  # here all drafts have this length
            made.sampled_token_ids[:, :most] = metadata.draft_token_ids.view(-1, most)
            return made

    return {
        kind.__name__: kind(sampler.Sampler("processed_logprobs"), None, torch.device("cpu"))
        for kind in (DraftVerifier, AcceptsAll)
    }


def sample_pairs(verifier: Any, temperature: float) -> tuple[float, list[bool], torch.Tensor]:
    """Verify drafts of two tokens.

    Return three values: the smaller p-value of the counts of the first and the second token, whether each first drafted
    token was accepted, and the policy's probabilities.
    """
    torch.manual_seed(5)
    logits_TV = torch.randn(3, 12, generator=torch.Generator().manual_seed(1)) * 1.5
    drafts = [(index % 12, index // 12 % 12) for index in range(6000)]
    tokens, _ = verify(verifier, logits_TV, drafts, temperature, {})
    chances_TV = torch.softmax(logits_TV.double() / temperature, -1)
    values = [
        compare([made[place] for made in tokens if len(made) > place], chances_TV[place].numpy()) for place in (0, 1)
    ]
    return min(values), [len(made) > 1 for made in tokens], chances_TV


def compare(tokens: Sequence[int], chances_V: Any) -> float:
    """Return the p-value of a chi-square test. Tokens that are expected less than five times are one category."""
    seen, expected = np.bincount(tokens, minlength=len(chances_V)), chances_V * len(tokens)
    rare = expected < 5
    pairs = [(seen[~rare], expected[~rare])]
    if rare.any():
        pairs.append(([seen[rare].sum()], [expected[rare].sum()]))
    counted, wanted = (np.concatenate(column) for column in zip(*pairs, strict=True))
    halves = (len(wanted) - 1) / 2, ((counted - wanted) ** 2 / wanted).sum() / 2
    return torch.special.gammaincc(*(torch.tensor(half, dtype=torch.float64) for half in halves)).item()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_verified_tokens_have_the_policys_distribution(verifiers: dict[str, Any], temperature: float) -> None:
    value, accepted, chances_TV = sample_pairs(verifiers["DraftVerifier"], temperature)
    assert value > LEAST_P
    # the policy's probability of the drafted token is the largest rate with an unchanged distribution
    wanted = np.mean([chances_TV[0, index % 12].item() for index in range(len(accepted))])
    assert np.mean(accepted) == pytest.approx(wanted, abs=0.02)
    assert sample_pairs(verifiers["AcceptsAll"], temperature)[0] < LEAST_P


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_verifier_keeps_drafts_up_to_the_first_difference(verifiers: dict[str, Any], temperature: float) -> None:
    logits_TV = torch.full((4, 6), -9.0)
    for place, token in enumerate((2, 4, 1, 3)):
        logits_TV[place, token] = 9.0
    drafts = [(2, 4, 1), (2, 5, 1), (0,), (), (2, 4)]
    tokens, logprobs = verify(verifiers["DraftVerifier"], logits_TV.clone(), drafts, temperature, {})
    assert tokens == [[2, 4, 1, 3], [2, 4], [2], [2], [2, 4, 1]]
    expected = torch.log_softmax(logits_TV / (temperature or 1.0), -1)
    for made, given in zip(tokens, logprobs, strict=True):
        assert given == pytest.approx([expected[place, token].item() for place, token in enumerate(made)], abs=1e-5)


def test_drafts_leave_a_seeded_request_unchanged(verifiers: dict[str, Any]) -> None:
    verifier, logits_TV = verifiers["DraftVerifier"], torch.randn(9, 4, generator=torch.Generator().manual_seed(2))
    for seed in range(40):
        plain = read_all(verifier, logits_TV, seed, lambda place: ())
        drafted = read_all(verifier, logits_TV, seed, lambda place, n=plain[0]: (*n[place : place + 2], place % 4))
        assert drafted[0] == plain[0]
        assert drafted[1] == pytest.approx(plain[1], abs=1e-5)
        assert drafted[2] < plain[2] == 9


def read_all(
    verifier: Any, logits_TV: torch.Tensor, seed: int, draft: Callable[[int], Sequence[int]]
) -> tuple[list[int], list[float], int]:
    """Sample a token for each position; return the tokens, their log-probs, and the number of steps."""
    generator, tokens, logprobs, steps = torch.Generator().manual_seed(seed), list[int](), list[float](), 0
    while (place := len(tokens)) < len(logits_TV):
        drafted = [*draft(place)][: len(logits_TV) - place - 1]
        made, given = verify(verifier, logits_TV[place:].clone(), [drafted], 1.0, {0: generator})
        tokens, logprobs, steps = tokens + made[0], logprobs + given[0], steps + 1
    return tokens, logprobs, steps


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(tmp_path_factory.mktemp("weights"), seed=0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> AsyncIterator[VllmEngine]:
    """Yield a seeded engine that drafts from past responses. The past responses are greedy and sampled responses."""
    engine = VllmEngine(
        VllmEngineConfig(speculation="suffix"), make_policy(tmp_path_factory.mktemp("policy")), seeded=True
    )
    await engine.start()
    await load(engine, weights, 0)
    sampled = [await ask(engine, prompt, 0.5, seed) for seed, prompt in enumerate(PROMPTS * 3, 900)]
    past = [(prompt, list(made.tokens)) for prompt, made in zip(PROMPTS * 3, sampled, strict=True)]
    past += zip(PROMPTS, greedy_rows(weights, PROMPTS, 30), strict=True)
    await engine.remember([pack(prompt, tokens) for prompt, tokens in past])
    yield engine
    await engine.close()


def pack(prompt: Sequence[int], tokens: Sequence[int]) -> PastResponse:
    return Int32s.of(prompt).data, Int32s.of(tokens).data


async def ask(engine: VllmEngine, prompt: tuple[int, ...], temperature: float, seed: int, most: int = 24) -> Generation:
    return await engine.generate(GenerationRequest(f"{next(NUMBERS)}", ModelInput.of(prompt), most, temperature, seed))


async def load(engine: VllmEngine, folder: Path, version: int) -> None:
    await engine.suspend("continue")
    await engine.update(version, folder)
    await engine.resume()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("temperature", [1.0, 0.5])
async def test_drafts_leave_the_engines_distribution_unchanged(
    engine: VllmEngine, weights: Path, temperature: float
) -> None:
    """The counts of the first two tokens of 4,000 responses are compared with the exact distribution, which
    transformers computes.
    """
    prompt = PROMPTS[0]
    made = await asyncio.gather(*(ask(engine, prompt, temperature, seed, 4) for seed in range(4000)))
    first_V = next_chances(weights, [prompt], temperature)[0]
    second_VV = next_chances(weights, [(*prompt, token) for token in range(VOCABULARY)], temperature)
    going_V = np.where(np.arange(VOCABULARY) == EOS, 0.0, first_V)
    assert compare([one.tokens[0] for one in made], first_V) > LEAST_P
    later = going_V @ second_VV / going_V.sum()
    assert compare([one.tokens[1] for one in made if len(one.tokens) > 1], later) > LEAST_P
    assert sum((one.drafts for one in made), DraftCounts()).accepted > 20


@pytest.mark.asyncio(loop_scope="module")
async def test_logprobs_of_drafted_tokens_are_the_policys(engine: VllmEngine, weights: Path) -> None:
    for temperature in (1.0, 0.4, 0.0):
        asked = [*itertools.product(PROMPTS, range(8))]
        made = await asyncio.gather(*(ask(engine, prompt, temperature, seed) for prompt, seed in asked))
        for (prompt, _), one in zip(asked, made, strict=True):
            expected = reference_logprobs(weights, (*prompt, *one.tokens), temperature or 1.0)
            assert one.logprobs == pytest.approx(expected[len(prompt) - 1 :], abs=1e-4)
        assert temperature == 1.0 or sum((one.drafts for one in made), DraftCounts()).accepted > 0


@pytest.mark.asyncio(loop_scope="module")
async def test_greedy_responses_are_the_same_with_and_without_drafts(engine: VllmEngine, weights: Path) -> None:
    made = await asyncio.gather(*(ask(engine, prompt, 0.0, 3) for prompt in PROMPTS))
    for one, greedy in zip(made, greedy_rows(weights, PROMPTS, 24), strict=True):
        assert list(one.tokens) == list(greedy[: len(one.tokens)])
        assert one.drafts.verified <= one.drafts.accepted  # most of these drafts are right


@pytest.mark.asyncio(loop_scope="module")
async def test_tokens_after_an_update_are_verified_by_new_weights(
    engine: VllmEngine, weights: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Drafts from before a weight update are dropped or verified by the new weights. Each token has the log-probability
    of its version.
    """
    new = make_weights(tmp_path_factory.mktemp("new"), seed=1)
    tasks = [asyncio.create_task(ask(engine, prompt, 0.7, 40 + seed, 150)) for seed, prompt in enumerate(PROMPTS * 4)]
    await asyncio.sleep(0.15)
    await load(engine, new, 1)
    made = await asyncio.gather(*tasks)
    await load(engine, weights, 2)
    folders = {0: weights, 1: new}
    spanning = [(prompt, one) for prompt, one in zip(PROMPTS * 4, made, strict=True) if len(set(one.versions)) == 2]
    assert spanning
    for prompt, one in spanning:
        for version, folder in folders.items():
            places = [place for place, named in enumerate(one.versions) if named == version]
            expected = reference_logprobs(folder, (*prompt, *one.tokens), 0.7)[len(prompt) - 1 :]
            assert [one.logprobs[place] for place in places] == pytest.approx(
                [expected[place] for place in places], abs=1e-4
            )


@pytest.mark.asyncio(loop_scope="module")
async def test_seeded_engine_draws_the_same_with_and_without_drafts(
    engine: VllmEngine, weights: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plain = VllmEngine(VllmEngineConfig(), make_policy(tmp_path_factory.mktemp("policy")), seeded=True)
    await plain.start()
    try:
        await load(plain, weights, 0)
        for seed, prompt in enumerate(PROMPTS):
            made, again = await ask(engine, prompt, 0.5, seed), await ask(plain, prompt, 0.5, seed)
            assert made.tokens == again.tokens
            assert again.drafts == DraftCounts()
    finally:
        await plain.close()
