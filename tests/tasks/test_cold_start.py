"""Tests that a cold start ends near its target accuracy, for any seed, any size and any machine's rounding."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rollflow.flows.config import load_recipe, parse_config
from rollflow.storage.errors import ConfigError
from rollflow.tasks.learners.torch_learner import load_model
from rollflow.tasks.policies.cold_start import HeldOutAccuracy, cold_start, generate_answers
from rollflow.tasks.policies.demonstrations import DemonstrationPool
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.prompts.tables import read_file
from rollflow.tasks.run.cold_start.demonstrated_episodes import DemonstratedEpisodes, open_pool
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import open_prompts

NEAR = 0.03
MORE = [pytest.mark.slow, pytest.mark.soak]
TINY = {
    "policy": {"cold_start": {"hidden_size": 64, "layers": 1, "heads": 2, "evaluate_every": 15}},
    "prompts": [{"kind": "sorting", "digits": 3, "held_out": 0.5}],
    "evaluation": {"prompts": 110},
    "engine": {"max_new_tokens": 4},
}


class Started:
    """A finished cold start: its result, its evaluations, and the policy's accuracy afterwards."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        cold = config.policy.cold_start
        assert cold is not None
        for name, data in build_cold_folder(cold, open_prompts(config, None, read_file).texts(500)).items():
            (folder / name).write_bytes(data)
        tokenizer = PolicyTokenizer(folder)
        prompts = open_prompts(config, tokenizer, read_file)
        held = prompts.held_out()

        def accuracy(model: Any) -> float:
            longest, end = config.engine.max_new_tokens, tokenizer.stop_tokens[0]
            found = generate_answers(model, [prompt.tokens for prompt in held], end, longest, 0.0, 0)
            right = [tokenizer.decode(a) == p.reference["answer"] for a, p in zip(found, held, strict=True)]
            return sum(right) / len(held)

        torch.manual_seed(config.seed)
        model = load_model(folder, config.policy.dtype, trained=False)
        self.seen: list[tuple[int, float]] = []

        def measure(model: Any) -> HeldOutAccuracy:
            return HeldOutAccuracy(accuracy(model), {})

        self.said = cold_start(model, cold, open_pool(config, prompts, tokenizer), measure, self._see)
        self.accuracy = accuracy(model)

    def _see(self, step: int, accuracy: float) -> None:
        self.seen.append((step, accuracy))


def tiny(seed: int, target: float, **cold: object) -> RunConfig:
    start = {**TINY["policy"]["cold_start"], "target_accuracy": target, **cold}  # type: ignore[dict-item,index]
    return parse_config({**TINY, "seed": seed, "policy": {"cold_start": start}})


@pytest.mark.long
@pytest.mark.parametrize(
    ("seed", "target"),
    [(0, 0.3), (1, 0.3), *(pytest.param(seed, 0.15 * part, marks=MORE) for seed in range(4) for part in (1, 2, 3))],
)
def test_cold_start_ends_near_the_target(tmp_path: Path, seed: int, target: float) -> None:
    started = Started(tmp_path, tiny(seed, target))
    assert 0 <= started.accuracy - target <= NEAR
    assert started.said == started.accuracy


@pytest.mark.long
def test_cold_start_above_its_target_returns_to_earlier_weights(tmp_path: Path) -> None:
    """The first evaluation comes long after the target was reached, so bisection starts from the first weights."""
    started = Started(tmp_path, tiny(0, 0.3, evaluate_every=120))
    step, first = started.seen[0]
    assert step == 120
    assert first > 0.3 + NEAR
    assert len(started.seen) > 1
    assert abs(started.accuracy - 0.3) <= NEAR


@pytest.mark.long
def test_cold_start_never_ends_below_the_target(tmp_path: Path) -> None:
    """With four questions, at least one answer is right, because a lower accuracy would be below the target."""
    config = tiny(0, 0.01)
    few = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"prompts": 4})})
    assert Started(tmp_path, few).accuracy >= 0.25


def test_cold_start_with_an_unreachable_target_fails(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"policy\.cold_start\.target_accuracy = 0\.9: the policy reached .* only 0\.\d\d in 10 steps",
    ):
        Started(tmp_path, tiny(0, 0.9, max_steps=10, evaluate_every=5))


def test_sources_further_from_the_target_get_more_demonstrations(tmp_path: Path) -> None:
    """A domain that has reached the target gets a tenth of the demonstrations of a domain with accuracy 0."""
    sources = [{"kind": "sorting", "digits": 3}, {"kind": "column-sums", "reward": "sums"}]
    rewards = {"rewards": {"sums": {"kind": "exact", "answer": "tag"}}}
    config = parse_config({**tiny(0, 0.3).model_dump(include={"policy"}), "prompts": sources, **rewards})
    cold = config.policy.cold_start
    assert cold is not None
    for name, data in build_cold_folder(cold, open_prompts(config, None, read_file).texts(100)).items():
        (tmp_path / name).write_bytes(data)
    tokenizer = PolicyTokenizer(tmp_path)
    encode = DemonstratedEpisodes(config, tokenizer)
    pool = DemonstrationPool(open_prompts(config, tokenizer, read_file), encode, random.Random(0))

    def count_sums() -> int:
        return sum(tokenizer.decode(prompt).startswith("Add") for prompt, *_ in pool.draw(1100))

    assert count_sums() == pytest.approx(550, abs=75)
    pool.weigh({"sorting": 0.5, "column-sums": 0.0}, 0.3)
    assert count_sums() == pytest.approx(1000, abs=45)
    pool.weigh({"sorting": 0.1, "column-sums": 0.2}, 0.3)
    assert count_sums() == pytest.approx(367, abs=75)


def test_mean_accuracy_weighs_prompt_sources_by_their_shares() -> None:
    right = {"sums": [True, False], "words": [True, True, True, False]}
    assert HeldOutAccuracy.of(right, {"sums": 0.75, "words": 0.25, "absent": 0.5}) == HeldOutAccuracy(
        0.75 * 0.5 + 0.25 * 0.75, {"sums": 0.5, "words": 0.75}
    )
    assert HeldOutAccuracy.of(right, {}).mean == 4 / 6


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("recipe", ["sorting", "reasoning"])
def test_cold_starts_of_recipes_end_near_their_targets(tmp_path: Path, recipe: str, seed: int) -> None:
    config = load_recipe(Path(f"flows/recipes/{recipe}.toml"), [f"seed={seed}"])
    assert config.policy.cold_start is not None
    started = Started(tmp_path, config)
    assert abs(started.accuracy - config.policy.cold_start.target_accuracy) <= NEAR
