"""Tests the prompts that ask for sorted digits: their answers are right, and a choice of digits is either held out or
trained on, in every order.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rollflow.flows.config import load_recipe
from rollflow.tasks.prompts.base import Question
from rollflow.tasks.prompts.config import SortingPrompts
from rollflow.tasks.prompts.held_out import HeldOut
from rollflow.tasks.prompts.sorting import SortingSource, build_question
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.scorers import build_verifier
from rollflow.tasks.scorers.verifier import score_response

ASKED = 4000


def source(seed: int = 0, **changes: object) -> SortingSource:
    return SortingSource(SortingPrompts.model_validate(changes), seed, HeldOut())


def digits(asked: Question) -> str:
    word = asked.text.removeprefix("Sort ").removesuffix(".")
    assert word.isdigit()
    return word


@pytest.mark.parametrize(("given", "answer"), [("31415", "11345"), ("90000", "00009"), ("12345", "12345")])
def test_sorting_answers_match_hand_examples(given: str, answer: str) -> None:
    asked = build_question(given)
    assert (asked.text, asked.answer, asked.reference["answer"]) == (f"Sort {given}.", answer, answer)


def test_held_out_split_of_sorting_separates_multisets() -> None:
    made = source(3)
    held = Counter("".join(sorted(digits(q))) for q in made.held_out(10_000))
    assert (len(held), set(held.values())) == (400, {1})
    asked = [digits(made.training(position)) for position in range(ASKED)]
    shown = [digits(made.demonstration(position)) for position in range(ASKED)]
    multisets = {"".join(sorted(word)) for word in asked + shown}
    assert not multisets & set(held)
    assert len(multisets) > 1550  # 1,602 multisets exist
    assert any(word != "".join(sorted(word)) for word in asked)


def test_multisets_of_digits_are_asked_equally_often() -> None:
    """Questions are drawn uniformly over multisets of digits. Uniformly drawn words would rarely repeat a digit."""
    made = source(digits=2, held_out=0.1)
    count = Counter("".join(sorted(digits(made.training(position)))) for position in range(5000))
    assert len(count) == 50
    assert 60 < min(count.values()) < max(count.values()) < 140


def test_held_out_split_of_sorting_depends_on_the_seed() -> None:
    assert {q.answer for q in source(0).held_out(400)} != {q.answer for q in source(1).held_out(400)}


@pytest.fixture(scope="module")
def recipe() -> RunConfig:
    return load_recipe(Path("flows/recipes/sorting.toml"))


def test_sorting_scorer_accepts_right_and_rejects_wrong_answers(recipe: RunConfig) -> None:
    verify = build_verifier(recipe.reward)
    for asked in map(source().training, range(50)):
        assert score_response(verify, recipe.reward.answer, asked.answer, asked.reference).value == 1.0
        for wrong in (asked.answer[:-1], asked.answer + "0", asked.answer[1:] + asked.answer[0], ""):
            right = wrong == asked.answer
            assert score_response(verify, recipe.reward.answer, wrong, asked.reference).value == float(right)


def test_quick_start_uses_the_unchanged_grpo_preset(recipe: RunConfig) -> None:
    """The documentation and the README say that the recipe changes no key of the preset."""
    assert (
        recipe.train.objective == RunConfig.model_validate({"train": {"objective": {"kind": "grpo"}}}).train.objective
    )
