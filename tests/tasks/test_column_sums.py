"""Tests of column sums: steps are correct, held-out sums are trained on in no order, and phrases are single tokens."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from rollflow.flows.config import load_recipe
from rollflow.storage.errors import ConfigError
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.prompts.base import Question
from rollflow.tasks.prompts.column_sums import PLACES, ColumnSumsSource, write_steps
from rollflow.tasks.prompts.config import ColumnSumsPrompts
from rollflow.tasks.prompts.held_out import HeldOut
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import open_prompts
from rollflow.tasks.scorers import build_verifier
from rollflow.tasks.scorers.verifier import score_response

ASKED = 500
SMALL = ColumnSumsPrompts(min_digits=1, max_digits=1)  # 45 pairs and 165 triples, whatever their order
WIDE = ColumnSumsPrompts(min_terms=2, max_terms=10, min_digits=1, max_digits=6)


def numbers(asked: Question) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", asked.text)))


@pytest.mark.parametrize(
    ("terms", "written"),
    [
        ([347, 58, 906], "ones 7+8=15+6=21, tens 2+4=6+5=11+0=11, hundreds 1+3=4+9=13, <answer>1311</answer>"),
        ([12, 3000], "ones 2+0=2, tens 1+0=1, hundreds 0, thousands 3, <answer>3012</answer>"),
        ([99, 1], "ones 9+1=10, tens 1+9=10, <answer>100</answer>"),
        ([10001, 9], f"ones 1+9=10, tens 1+0=1, hundreds 0, thousands 0, {PLACES[4]} 1, <answer>10010</answer>"),
    ],
)  # fmt: skip
def test_demonstrated_addition_matches_a_hand_example(terms: list[int], written: str) -> None:
    assert write_steps(terms) == written


def test_demonstrated_steps_and_answer_of_a_sum_are_correct() -> None:
    source = ColumnSumsSource(WIDE, 0, 0, HeldOut())
    for asked in map(source.demonstration, range(ASKED)):
        terms, carried = numbers(asked), 0
        *columns, tag = asked.answer.split(", ")
        assert tag == f"<answer>{sum(terms)}</answer>"
        for place, column in enumerate(columns):
            name, first, rest = re.fullmatch(r"(\D+) (\d)(.*)", column).groups()  # type: ignore[union-attr]
            added, totals = re.findall(r"\+(\d)", rest), [int(first), *map(int, re.findall(r"=(\d+)", rest))]
            digits = [term // 10**place % 10 for term in terms if term >= 10**place]
            assert (name, [int(first), *map(int, added)]) == (PLACES[place], [carried] * (carried > 0) + digits)
            assert [b - a for a, b in pairwise(totals)] == list(map(int, added))
            carried = totals[-1] // 10


def test_held_out_sum_is_not_trained_on_in_any_order() -> None:
    source = ColumnSumsSource(SMALL, 0, 60, HeldOut())
    held = [tuple(sorted(numbers(asked))) for asked in source.held_out(60)]
    assert len(set(held)) == 60
    for stream in (source.training, source.demonstration):
        asked = {numbers(stream(position)) for position in range(ASKED)}
        assert not {tuple(sorted(terms)) for terms in asked} & set(held)
        assert any(terms != tuple(sorted(terms)) for terms in asked)


def test_random_sums_stay_within_and_reach_their_bounds() -> None:
    source = ColumnSumsSource(ColumnSumsPrompts(min_terms=2, max_terms=4, min_digits=2, max_digits=3), 0, 0, HeldOut())
    drawn = [numbers(source.training(position)) for position in range(ASKED)]
    assert {len(terms) for terms in drawn} == {2, 3, 4}
    assert {len(str(term)) for terms in drawn for term in terms} == {2, 3}


def test_sum_source_without_training_questions_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.prompts: 210 sums are held out, and no other sum is left"):
        ColumnSumsSource(SMALL, 0, 300, HeldOut()).training(0)


@pytest.fixture(scope="module")
def recipe() -> RunConfig:
    return load_recipe(Path("flows/recipes/reasoning.toml"))


@pytest.fixture(scope="module")
def tokenizer(recipe: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> PolicyTokenizer:
    """Build the tokenizer of the recipe's cold start."""
    folder = tmp_path_factory.mktemp("policy")
    texts = ColumnSumsSource(WIDE, 0, 0, HeldOut())
    shown = [text for asked in map(texts.demonstration, range(ASKED)) for text in (asked.text, asked.answer)]
    for name, data in build_cold_folder(recipe.policy.cold_start or ColdStart(), shown).items():
        (folder / name).write_bytes(data)
    return PolicyTokenizer(folder)


def test_digits_and_phrases_are_single_tokens(recipe: RunConfig, tokenizer: PolicyTokenizer) -> None:
    """Several tokenizations of the same phrase, or tokens of two digits, would hide the columns."""
    source = ColumnSumsSource(WIDE, 0, 0, HeldOut())
    for asked in map(source.demonstration, range(ASKED)):
        for text in (asked.text, asked.answer):
            pieces = [tokenizer.decode([token]) for token in tokenizer.encode(text)]
            assert pieces == re.findall(r"\d|\D+", text)


def test_answers_of_the_sum_recipe_fit_and_differ_in_length(recipe: RunConfig, tokenizer: PolicyTokenizer) -> None:
    prompts = open_prompts(recipe, tokenizer, lambda source: b"")
    lengths = [len(tokenizer.encode(prompts.demonstration(index)[1])) + 1 for index in range(ASKED)]
    assert max(lengths) <= recipe.engine.max_new_tokens
    assert 30 <= sum(lengths) / ASKED <= 60
    assert max(lengths) > 2 * min(lengths)


def test_only_a_correct_demonstration_is_scored_as_correct(recipe: RunConfig) -> None:
    verify, where = build_verifier(recipe.reward), recipe.reward.answer
    for asked in map(ColumnSumsSource(WIDE, 0, 0, HeldOut()).demonstration, range(50)):
        assert score_response(verify, where, asked.answer, asked.reference).value == 1.0
        assert (
            score_response(verify, where, asked.answer.replace("</answer>", "0</answer>"), asked.reference).value == 0.0
        )
        assert score_response(verify, where, asked.answer.removesuffix("</answer>"), asked.reference).value == 0.0
