"""Tests the benchmark's counting questions, whose answers have long-tailed lengths: lengths, right answers, and
held-out questions.
"""

from __future__ import annotations

import random
import statistics
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.long_answers import TOKENS, CountdownSource, build_question
from rollflow.flows.config import load_recipe

MEDIAN, CAP = 16.0, 20.0


def test_question_counts_down_to_its_end() -> None:
    question = build_question(457, 4)
    assert (question.text, question.answer) == ("Count 457 to 454.", "457 456 455 454")
    assert build_question(100, 1).text == "Count 100 to 100."


@given(st.integers(0, 50), st.integers(0, 10**6))
def test_countdown_numbers_have_3_digits_and_a_limited_count(seed: int, position: int) -> None:
    source = CountdownSource(seed, 0)
    for question in (source.training(position), source.demonstration(position)):
        numbers = question.answer.split()
        assert all(len(number) == 3 for number in numbers)
        assert len(numbers) * TOKENS <= CAP * MEDIAN
        assert question.text == f"Count {numbers[0]} to {numbers[-1]}."
    assert source.training(position) == CountdownSource(seed, 0).training(position)


def test_answer_lengths_are_lognormal() -> None:
    """Half of the answers have at most the median length, and about 2% have more than eight times this length."""
    source, draw = CountdownSource(0, 0), random.Random(0)
    tokens = sorted(TOKENS * source.draw_numbers(draw) for _ in range(20_000))
    assert statistics.median(tokens) == MEDIAN
    assert 0.01 < sum(length > 8 * MEDIAN for length in tokens) / len(tokens) < 0.03  # 1.9% in a lognormal distribution
    assert max(tokens) == CAP * MEDIAN


def test_countdown_source_trains_on_no_held_out_start_number() -> None:
    source = CountdownSource(3, 200)
    held = source.held_out(200)
    starts = {question.answer[:3] for question in held}
    assert len({question.text for question in held}) == 200
    asked = {source.training(n).answer[:3] for n in range(2000)}
    asked |= {source.demonstration(n).answer[:3] for n in range(2000)}
    assert not starts & asked


def test_recipe_of_long_answers_leaves_room_for_the_longest() -> None:
    config = load_recipe(Path("benchmarks/long_answers.toml"))
    assert config.engine.max_new_tokens > CAP * MEDIAN
    assert config.policy.cold_start is not None
    assert config.policy.cold_start.context >= config.engine.max_new_tokens + len("Count 457 to 380.")
