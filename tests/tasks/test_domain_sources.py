"""Tests of the questions of the recipe `domains`: demonstrated answers pass their scorer, and wrong answers do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rollflow.storage.records import Outcome
from rollflow.tasks.environments.tool_calls import parse_action
from rollflow.tasks.prompts.base import Question, QuestionSource
from rollflow.tasks.prompts.domains import LinePrograms, LongProducts, WordLists
from rollflow.tasks.scorers.code.scorer import find_cases_fault
from rollflow.tasks.scorers.config import CodeReward
from rollflow.tasks.scorers.text.instructions import follow_instructions

ASKED = 300


def list_questions(source: QuestionSource) -> Iterator[Question]:
    yield from source.held_out(40)
    for position in range(ASKED):
        yield source.training(position)
        yield source.demonstration(position)


def execute(program: str, stdin: str) -> str:
    """Execute a program that a source wrote; return what it printed."""
    printed: list[Any] = []
    exec(program, {"input": lambda: stdin, "print": printed.append})
    return "".join(f"{value}\n" for value in printed)


@pytest.mark.parametrize("most", [2, 3])
def test_demonstrated_programs_pass_their_test_cases(most: int) -> None:
    for question in list_questions(LinePrograms(seed=1, held_out=40, most=most)):
        cases = question.reference["cases"]
        assert [execute(question.answer, case["stdin"]) for case in cases] == [case["stdout"] for case in cases]
        assert find_cases_fault(CodeReward(), question.reference) is None


def test_programs_with_a_missing_step_fail_their_test_cases() -> None:
    """Steps may cancel out, as in "plus 3, minus 3", but not often."""
    failed = 0
    for question in list_questions(LinePrograms(seed=1, held_out=40)):
        shorter = ";".join(part for n, part in enumerate(question.answer.split(";")) if n != 1)
        failed += any(execute(shorter, case["stdin"]) != case["stdout"] for case in question.reference["cases"])
    assert failed == 2 * ASKED + 40


def test_demonstrated_word_lists_follow_their_constraints() -> None:
    for question in list_questions(WordLists(seed=1, held_out=40)):
        assert follow_instructions(question.answer, question.reference).outcome is Outcome.CORRECT
        longer = f"{question.answer}, {question.answer}"
        assert follow_instructions(longer, question.reference).outcome is Outcome.PARTIAL


def test_demonstrated_product_is_computed_by_a_tool_call() -> None:
    for question in list_questions(LongProducts(seed=1, held_out=40)):
        first, last = question.turns
        [call] = parse_action(first.said).calls
        assert (call.name, [*call.arguments]) == ("python", ["code"])
        one, other = map(int, question.text.split("*"))
        assert len(question.answer) == 8
        assert (call.arguments["code"], int(question.answer)) == (question.text, one * other)
        assert (first.replies[0]["content"], last.said) == (f"{question.answer}\n", question.answer)


def test_product_of_held_out_numbers_is_not_trained_on() -> None:
    """There are 2,346 products of two numbers from 32 to 99, in either order."""
    source = LongProducts(seed=1, held_out=300, digits=2)
    held = {question.key for question in source.held_out(300)}
    assert len(held) == 300
    texts = [source.training(position).text for position in range(3000)]
    assert not held & {"*".join(sorted(text.split("*"), key=int)) for text in texts}


@pytest.mark.parametrize("kind", [LinePrograms, WordLists])
def test_held_out_questions_are_not_trained_on(kind: type[LinePrograms | WordLists]) -> None:
    """With at most two steps or words, there are so few questions that any held-out one in training would be found."""
    source = kind(seed=1, held_out=200, most=2)
    held = {question.key for question in source.held_out(200)}
    assert len(held) == 200
    others = {source.training(position).key for position in range(2000)}
    assert not held & (others | {source.demonstration(position).key for position in range(2000)})
