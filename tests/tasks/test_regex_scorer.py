"""The verifier `regex`: patterns from the config and from the row, with and without a group."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rollflow.storage.records import Outcome
from rollflow.tasks.scorers import build_verifier
from rollflow.tasks.scorers.base import Score
from rollflow.tasks.scorers.config import RegexReward

YEAR = r"(?P<year>\d{4})"
Keys = dict[str, Any]


def score(response: str, reference: Keys, **keys: Any) -> Score:
    found: Score = build_verifier(RegexReward(**keys))(response, reference)
    return found


@pytest.mark.parametrize(
    ("response", "keys", "outcome"),
    [
        ("12", {"pattern": r"\d+"}, "correct"),
        ("12 ", {"pattern": r"\d+"}, "wrong"),
        ("a 12", {"pattern": r"\d+"}, "wrong"),
        ("a 12", {"pattern": r"\d+", "match": "search"}, "correct"),
        ("twelve", {"pattern": r"\d+", "match": "search"}, "wrong"),
        ("a\nb", {"pattern": "a.b"}, "correct"),
        ("AB", {"pattern": "ab"}, "wrong"),
        ("AB", {"pattern": "ab", "ignore_case": True}, "correct"),
        ("", {"pattern": ""}, "correct"),
        ("x", {"pattern": ""}, "wrong"),
        ("x", {"pattern": "", "match": "search"}, "correct"),
        ("2024", {"pattern": YEAR, "group": "year"}, "correct"),
        ("2023", {"pattern": YEAR, "group": "year"}, "wrong"),
        ("24", {"pattern": YEAR, "group": "year"}, "unparsable"),
        ("in 2023, no, 2024", {"pattern": YEAR, "group": "year", "match": "search"}, "correct"),
        ("in 2024, no, 2023", {"pattern": YEAR, "group": "year", "match": "search"}, "wrong"),
        ("in 2024", {"pattern": rf"in (?:{YEAR}|now)", "group": "year"}, "correct"),
        ("in now", {"pattern": rf"in (?:{YEAR}|now)", "group": "year"}, "unparsable"),
        ("= 2024 ", {"pattern": "=(?P<year>.*)", "group": "year"}, "correct"),
        (" = 2024", {"pattern": r"\s*=(?P<year>.*)", "group": "year"}, "correct"),
    ],
)
def test_regular_expression_decides_the_outcome(response: str, keys: Keys, outcome: str) -> None:
    found = score(response, {"answer": "2024"}, **keys)
    assert (found.outcome, found.value) == (outcome, float(outcome == "correct")), found


def test_regular_expression_of_the_prompt_row_is_used() -> None:
    assert score("b", {"pattern": "[ab]"}).value == 1.0
    assert score("c", {"pattern": "[ab]"}).value == 0.0
    assert score("c", {"pattern": "[ab]"}, pattern="c").value == 1.0


def test_regex_scorer_can_ignore_upper_and_lower_case() -> None:
    keys = {"pattern": "it is (?P<name>.*)", "group": "name"}
    assert score("it is PARIS", {"answer": "Paris"}, **keys).outcome is Outcome.WRONG
    assert score("It is PARIS", {"answer": "Paris"}, ignore_case=True, **keys).outcome is Outcome.CORRECT


@pytest.mark.parametrize("reference", [{}, {"pattern": 3}, {"pattern": "("}, {"pattern": "a"}])
def test_prompt_row_without_a_regular_expression_is_an_error(reference: Keys) -> None:
    with pytest.raises(ValueError, match="pattern"):
        score("a", reference, group="name")


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"pattern": "("}, "pattern = '\\('.*not a valid regular expression"),
        ({"pattern": "a", "group": "year"}, "group = 'year'.*no group"),
    ],
)
def test_invalid_regular_expression_is_refused(keys: Keys, sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        RegexReward(**keys)
