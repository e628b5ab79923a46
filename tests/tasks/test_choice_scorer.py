"""Tests of the verifier `choice` on responses that choose one, no or several letters."""

from __future__ import annotations

from typing import Any

import pytest

from rollflow.storage.records import Outcome
from rollflow.tasks.scorers.text.choice import choose, find_gold

CITIES = ["Rome", "Paris", "Oslo", "Both A and B"]
ROW = {"answer": "B", "options": CITIES}
BARE = {"answer": "B"}
RIGHT = [
    r"\boxed{B}",
    r"\boxed{\text{B}}",
    r"\boxed{(B)}",
    r"\boxed{B. Paris}",
    r"\boxed{Paris}",
    r"\boxed{b}",
    r"Not \boxed{A}, I was wrong. It has to be \boxed{B}",
    "<answer>B</answer>",
    "<answer> (B) Paris </answer>",
    "A is in Italy.\n#### B",
    "Answer: B",
    "Answer: (B)",
    "**Answer: B**",
    "**Answer:** B. Paris",
    "The answer is B.",
    "The correct answer is (B), because Paris is in France.",
    "Option A is in Italy and option C in Norway, so the answer is option B",
    "The best choice is B",
    "B",
    "(B)",
    "B.",
    "b",
    "B) Paris",
    "B. Paris",
    "B.  \n Paris",
    "Paris",
    "paris.",
    "**B**",
    "Rome is in Italy.\nSo:\nB",
    "It is (B), the capital of France.",
    "answer = B",
    "The final answer is $B$",
]
WRONG = [
    r"\boxed{A}",
    "Answer: C",
    "(A)",
    "Rome",
    "D",
    "Both A and B",
    r"\boxed{\text{Oslo}}",
    "The answer is A, not B.",
]
UNPARSABLE = [
    "",
    "I do not know.",
    "A good question.",
    r"\boxed{}",
    r"\boxed{A, B}",
    r"\boxed{A or B}",
    r"\boxed{A} or \boxed{B}",
    "The answer is A or B.",
    "Answer: A\nAnswer: B",
    "It is (A) or (B).",
    "A, B",
    "The answer is a city.",
    "Answer: E",
    "Answer: Z",
    "B. Rome",
]


@pytest.mark.parametrize("response", RIGHT)
def test_response_with_the_correct_letter_is_correct(response: str) -> None:
    found = choose(response, ROW)
    assert (found.value, found.outcome) == (1.0, Outcome.CORRECT), found
    assert found.reason == "B chosen, B is right"


@pytest.mark.parametrize("response", WRONG)
def test_response_with_a_different_letter_is_wrong(response: str) -> None:
    found = choose(response, ROW)
    assert (found.value, found.outcome) == (0.0, Outcome.WRONG), found


@pytest.mark.parametrize("response", UNPARSABLE)
def test_response_with_no_or_several_letters_is_unparsable(response: str) -> None:
    found = choose(response, ROW)
    assert (found.value, found.outcome) == (0.0, Outcome.UNPARSABLE), found


@pytest.mark.parametrize("response", ["B", "(B)", "B. some city", r"\boxed{B}", "The answer is B"])
def test_choice_row_without_options_accepts_a_letter(response: str) -> None:
    assert choose(response, BARE).value == 1.0


@pytest.mark.parametrize(
    ("reference", "letter"),
    [
        ({"answer": "C"}, "C"),
        ({"answer": "(c)"}, "C"),
        ({"answer": "Oslo", "options": CITIES}, "C"),
        ({"answer": "y", "options": {"x": "one", "y": "two"}}, "Y"),
        ({"answer": "two", "options": {"X": "one", "Y": "two"}}, "Y"),
    ],
)
def test_reference_answer_is_a_letter_or_the_text_of_an_option(reference: dict[str, Any], letter: str) -> None:
    assert find_gold(reference) == letter


@pytest.mark.parametrize(
    "reference",
    [
        {"answer": "K"},
        {"answer": "A, B"},
        {"answer": "Berlin", "options": CITIES},
        {"answer": "E", "options": CITIES},
        {"answer": "A", "options": []},
        {"answer": "A", "options": "Rome"},
        {"answer": "A", "options": {"A": "Rome", "a": "Paris"}},
        {"answer": "same", "options": ["same", "same"]},
        {"answer": "A", "options": ["B", "A"]},
        {"answer": "Rome" + " " * 100_000 + "Paris", "options": CITIES},
    ],
)
def test_reference_answer_that_is_no_option_is_refused(reference: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"answer|options"):
        find_gold(reference)
