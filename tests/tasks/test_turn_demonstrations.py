"""A cold start on episodes with several turns: what the policy is trained on, and how its accuracy is measured."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rollflow.flows.config import parse_config
from rollflow.flows.prepare import prepare
from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import Prompt
from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.environments.ports import NO_PORTS
from rollflow.tasks.games.grid import MOVES
from rollflow.tasks.policies.cold_start import answer_loss
from rollflow.tasks.policies.demonstrations import Demonstration, DemonstrationPool
from rollflow.tasks.policies.head import LMHead
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.prompts.base import DemonstratedTurn, Question, QuestionSource
from rollflow.tasks.run import held_out_episodes
from rollflow.tasks.run.cold_start.demonstrated_episodes import DemonstratedEpisodes
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.held_out_accuracy import HeldOutJudge
from rollflow.tasks.run.held_out_episodes import BatchedModel, play_episodes
from rollflow.tasks.scorers.base import Score
from tests.contracts.test_token_logprobs import model_of
from tests.support.waiting import HANG_SECONDS

GAME: dict[str, Any] = {
    "prompts": [{"kind": "frozen-lake", "moves": 6}],
    "environment": {"kind": "frozen-lake", "max_turns": 6},
    "engine": {"kind": "timed", "max_new_tokens": 11},
    "evaluation": {"prompts": 12},
    "policy": {"cold_start": {"vocabulary": 258, "hidden_size": 32, "heads": 2, "layers": 1}},
}


class Calls(QuestionSource):
    """A source whose demonstrations end the first turn with the stop token, and get two replies."""

    def __init__(self, *, seed: int, held_out: int) -> None:
        self._start = seed

    def training(self, position: int) -> Question:
        return self._question(f"t{position}")

    def demonstration(self, position: int) -> Question:
        return self._question(f"d{position}")

    def held_out(self, count: int) -> list[Question]:
        return [self._question(f"h{position}") for position in range(count)]

    def _question(self, text: str) -> Question:
        replies = ({"role": "tool", "content": "=3"}, {"role": "user", "content": "?"})
        turns = (DemonstratedTurn("ask", replies, ends=True), DemonstratedTurn("three"))
        return Question(text, "three", {"answer": "three"}, turns=turns)


def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> RunContext:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    return prepare(parse_config({**GAME, **changes}), "game")


def draw_texts(context: RunContext) -> tuple[list[str], list[str]]:
    """Draw demonstrations; return their responses, and of each the tokens that the policy is trained on."""
    tokenizer: PolicyTokenizer = context.tokenizer
    encode = DemonstratedEpisodes(context.config, tokenizer)
    shown = DemonstrationPool(context.prompts(), encode, random.Random(0)).draw(20)
    trained = [
        tokenizer.decode([token for token, mine in zip(one.response, one.sampled, strict=True) if mine])
        for one in shown
    ]
    return [tokenizer.decode(one.response) for one in shown], trained


def test_demonstrated_game_equals_the_played_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    responses, trained = draw_texts(prepared(tmp_path, monkeypatch))
    assert all(set(moves) <= set(MOVES) for moves in trained)
    for response, moves in zip(responses, trained, strict=True):
        assert response[::2] == moves
        assert not response[1::2] or response[1::2].islower()


def test_demonstrated_turn_may_end_with_a_stop_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [{"kind": "import", "path": f"{__name__}:Calls"}]
    context = prepared(tmp_path, monkeypatch, prompts=prompts, environment={"kind": "single-turn"})
    responses, trained = draw_texts(context)
    assert set(responses) == {"ask<|end|>=3?three"}
    assert set(trained) == {"ask<|end|>three"}


def test_loss_leaves_out_tokens_of_the_environment() -> None:
    """The loss with a mask is the mean over the masked tokens of the loss of each token."""
    model = model_of("llama").eval()
    prompt, response = [5, 6, 7], [8, 9, 10, 11]
    decoder, head = model.get_decoder(), LMHead(model)
    parts = [
        answer_loss(decoder, head, [Demonstration(prompt, response, [i == place for i in range(4)])])
        for place in range(4)
    ]
    masked = answer_loss(decoder, head, [Demonstration(prompt, response, [True, False, False, True])])
    torch.testing.assert_close(masked, (parts[0] + parts[3]) / 2)
    whole = answer_loss(decoder, head, [Demonstration(prompt, response)])
    torch.testing.assert_close(whole, torch.stack(parts).mean())


def test_accuracy_of_a_game_is_measured_in_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for the model solves the boards of two of three prompts; their solutions have several turns."""
    context = prepared(tmp_path, monkeypatch)
    held = context.prompts().held_out()
    prompts_of = {tuple(prompt.tokens): prompt for prompt in held}

    def generate(model: Any, prompts: Sequence[Sequence[int]], end: int, longest: int, *_: Any) -> list[list[int]]:
        assert longest == 1
        said = []
        for tokens in prompts:
            start = next(one for one in prompts_of if tuple(tokens[: len(one)]) == one)
            prompt, turn = prompts_of[start], (len(tokens) - len(start)) // 2
            solution = prompt.reference["answer"] if prompt.index % 3 else "x"
            said.append(context.tokenizer.encode_response(solution[turn]))
        return [list(one) for one in said]

    monkeypatch.setattr(held_out_episodes, "generate_answers", generate)
    with HeldOutJudge(context) as measure:
        assert measure(None).mean == pytest.approx(8 / 12)
    assert max(len(prompt.reference["answer"]) for prompt in held) > 2


class Repeats(Environment):
    """An environment in which each episode has as many turns as its prompt has tokens."""

    async def play(self, episode: Episode) -> Score | None:
        for _ in episode.prompt.tokens:
            made = await episode.generate(stop=("c",), max_tokens=3)
            if made is None:
                return None
        return Score(float(len(made.tokens)))


async def test_episodes_of_different_lengths_share_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = list[int]()

    def generate(model: Any, prompts: Sequence[Sequence[int]], *_: Any) -> list[list[int]]:
        batches.append(len(prompts))
        return [[99, 100] for _ in prompts]  # the first token completes the stop string

    monkeypatch.setattr(held_out_episodes, "generate_answers", generate)
    asked = [Prompt("p", i, "test", "", ModelInput.of((1,) * (i + 1)), {}) for i in range(3)]
    model = BatchedModel(None, CODE_POINTS, 0.0, 0)  # type: ignore[arg-type]
    assert await play_episodes(model, Repeats(), asked, 40, _refuse, 256, NO_PORTS) == [True] * 3
    assert batches == [3, 2, 1]


class Placed(Repeats):
    """An environment like `Repeats` that runs at most two episodes at a time."""

    def __init__(self) -> None:
        self.places = asyncio.Semaphore(2)

    async def play(self, episode: Episode) -> Score | None:
        async with self.places:
            return await super().play(episode)


@pytest.mark.parametrize("places", [2, None])
async def test_episodes_beyond_the_limit_wait_and_are_played(
    monkeypatch: pytest.MonkeyPatch, places: int | None
) -> None:
    """Three of five episodes cannot request a turn before others end; with None, the caller does not know this
    limit.
    """
    batches = list[int]()

    def generate(model: Any, prompts: Sequence[Sequence[int]], *_: Any) -> list[list[int]]:
        batches.append(len(prompts))
        return [[99, 100] for _ in prompts]

    monkeypatch.setattr(held_out_episodes, "generate_answers", generate)
    monkeypatch.setattr(held_out_episodes, "STALL_SECONDS", 0.05)
    asked = [Prompt("p", i, "test", "", ModelInput.of((1, 1)), {}) for i in range(5)]
    model = BatchedModel(None, CODE_POINTS, 0.0, 0)  # type: ignore[arg-type]
    playing = play_episodes(model, Placed(), asked, 40, _refuse, 256, NO_PORTS, places)
    assert await asyncio.wait_for(playing, HANG_SECONDS) == [True] * 5
    assert places is None or batches == [2, 2, 2, 2, 1, 1]


async def _refuse(_: object) -> Score:
    raise AssertionError("this environment scores nothing")


class CodePointsWithEnd:
    """A tokenizer whose tokens are code points, and whose stop token is 0."""

    stop_tokens = (0,)

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))


CODE_POINTS = CodePointsWithEnd()
