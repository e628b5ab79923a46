"""Tests each constraint of IFEval that the scorer checks, on texts that follow the constraint and texts that do not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from rollflow.storage.records import Outcome
from rollflow.tasks.scorers import build_verifier
from rollflow.tasks.scorers.config import InstructionsReward
from rollflow.tasks.scorers.references import find_reference_fault
from rollflow.tasks.scorers.text import language
from rollflow.tasks.scorers.text.constraints import CHECKS, check_constraint, count_sentences, count_words
from rollflow.tasks.scorers.text.instructions import follow_instructions
from rollflow.tasks.scorers.text.language import detect_language, list_languages
from rollflow.tasks.scorers.verifier import score_response

AT_LEAST, LESS = "at least", "less than"
# name, arguments, texts that follow the constraint, texts that do not
EXAMPLES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("keywords:existence", {"keywords": ["cat", "dog"]}, ["A Cat and a dog.", "dogcat"], ["A cat.", "Nothing."]),
    (
        "keywords:frequency",
        {"keyword": "cat", "frequency": 2, "relation": AT_LEAST},
        ["cat Cat", "cat cat cat"],
        ["cat", "dog"],
    ),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2, "relation": LESS}, ["cat", "dog"], ["cat cat"]),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, ["A dog.", "A category."], ["A cat.", "CAT!"]),
    (
        "keywords:letter_frequency",
        {"letter": "q", "let_frequency": 2, "let_relation": AT_LEAST},
        ["Quick queue", "qqq"],
        ["quick", "none"],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": LESS},
        ["One. Two.", "Dr. Smith came at 3.5 p.m. today. He left!"],
        ["One. Two! Three?", "One. Two. Three. Four."],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["One\n***\nTwo", "***\nOne\n***\nTwo\n***"],
        ["One", "One\n***\n***\nTwo", "One\n***\nTwo\n***\nThree"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": AT_LEAST},
        ["a b c", "it's well-known to all"],
        ["a b", "-- !"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        ["First.\n\nThen, more.", 'First.\n\n\n"Then" again'],
        ["First.\n\nNow more.", "Then.", "One.\n\nThen.\n\nThree."],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name] [address]", "[a][b][c]"],
        ["[name]", "(a) (b)"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Text.\nP.S. more", "Text.\np. s. more"],
        ["Text.", "Ps more"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        ["Text.\nP.P.S more", "P. P. S. x"],
        ["P.S. more", "x"],
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "Text:\n- a\n  - b"],
        ["* a", "* a\n* b\n* c", "**a**\n**b**"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is yes.", "I think: My answer is maybe."],
        ["Yes.", "my answer is yes"],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* and *b*", "**a** and *b*"],
        ["*a*", "** ** and * *"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb", "SECTION 1 SECTION 2 SECTION 3"],
        ["SECTION 1", "SECTION one SECTION two"],
    ),
    ("detectable_format:json_format", {}, ['{"a": [1]}', '```json\n{"a": 1}\n```'], ["{a: 1}", 'Here: {"a": 1}']),
    ("detectable_format:title", {}, ["<<A poem>>\nText", "Text <<x>>"], ["A poem", "<<>>", "<< >>"]),
    (
        "combination:two_responses",
        {},
        ["one\n******\ntwo", "a ****** b"],
        ["one", "one\n******\none", "a ****** b ****** c"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Write a poem."},
        ["Write a poem. Here it is.", " write a POEM.\nok"],
        ["Here: Write a poem.", "A poem."],
    ),
    (
        "startend:end_checker",
        {"end_phrase": "The end."},
        ["Text. The end.", 'Text. "the end."'],
        ["The end. More.", "Text."],
    ),
    ("startend:quotation", {}, ['"Text."', ' "a" and "b" '], ["Text.", '"Text.', '"']),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": AT_LEAST},
        ["A BIG DOG", "NASA and ESA"],
        ["a BIG dog", "None Here"],
    ),
    ("change_case:english_capital", {}, ["ALL OF IT.", "A1"], ["Not all.", "NOT ALl", "123"]),
    ("change_case:english_lowercase", {}, ["all of it.", "a1"], ["Not all.", "123"]),
    (
        "language:response_language",
        {"language": "de"},
        ["Der Hund läuft über die Wiese und bellt.", "123", "https://example.org"],
        ["The dog runs over the meadow and barks.", "Le chien court dans le pré."],
    ),
    ("language:response_language", {"language": "hi"}, ["यह एक छोटा वाक्य है।", "1"], ["This is English."]),
    ("language:response_language", {"language": "zh-cn"}, ["中文是一种语言。", "?!"], ["猫はかわいいです。"]),
    ("punctuation:no_comma", {}, ["No comma.", "a; b"], ["A, b", ","]),
]
NAMES = ["punctuation:no_comma", "keywords:existence", "keywords:existence"]
ROW = {"instruction_id_list": NAMES, "kwargs": [{}, {"keywords": ["cat"]}, {"keywords": ["dog"], "letter": None}]}


def test_every_instruction_constraint_has_test_examples() -> None:
    assert {name for name, *_ in EXAMPLES} == set(CHECKS)
    assert len(CHECKS) == 25
    assert all(len(follows) + len(breaks) >= 3 for _, _, follows, breaks in EXAMPLES)


@pytest.mark.parametrize(("name", "arguments", "follows", "breaks"), EXAMPLES, ids=[name for name, *_ in EXAMPLES])
def test_response_follows_or_breaks_each_constraint(
    name: str, arguments: dict[str, Any], follows: list[str], breaks: list[str]
) -> None:
    assert [text for text in follows if not check_constraint(name, text, arguments)] == []
    assert [text for text in ("", " ", *breaks) if check_constraint(name, text, arguments)] == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("One", 1),
        ("One. Two", 2),
        ("Wait... what?!", 2),
        ("1. First.\n2. Second.", 2),
        ('He said "No." Then left.', 2),
    ],
)
def test_instruction_scorer_counts_sentences(text: str, count: int) -> None:
    assert count_sentences(text) == count


def test_instruction_scorer_counts_words() -> None:
    assert count_words("It's a well-known fact: 3 cats, 2 dogs.") == 8


def test_score_is_the_share_of_followed_constraints() -> None:
    score = follow_instructions("A cat, a bird", ROW)
    assert score.value == 1 / 3
    assert score.outcome is Outcome.PARTIAL
    assert score.parts == {"punctuation:no_comma": 0.0, "keywords:existence": 1.0, "keywords:existence#2": 0.0}
    assert score.reason == "1 of 3 constraints followed; not punctuation:no_comma"


def test_strict_score_is_0_if_a_constraint_is_broken() -> None:
    assert follow_instructions("A cat and a bird", ROW, strict=True).value == 0.0
    score = follow_instructions("A cat and a dog", ROW, strict=True)
    assert (score.value, score.outcome) == (1.0, Outcome.CORRECT)


@pytest.mark.parametrize(("response", "outcome"), [("", "unparsable"), ("A, b", "wrong")])
def test_response_that_follows_no_constraint_scores_zero(response: str, outcome: str) -> None:
    score = follow_instructions(response, ROW)
    assert (score.value, score.outcome) == (0.0, outcome)


@pytest.mark.parametrize(
    ("reference", "fault"),
    [
        ({}, "instruction_id_list"),
        ({"instruction_id_list": [], "kwargs": []}, "instruction_id_list"),
        ({"instruction_id_list": '["punctuation:no_comma"]', "kwargs": [{}]}, "prompts.json_columns"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": "[{}]"}, "prompts.json_columns"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "kwargs"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [3]}, "kwargs"),
        (
            {"instruction_id_list": ["punctuation:none"], "kwargs": [{}]},
            "no constraint has the name 'punctuation:none'",
        ),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{}]}, "needs the argument 'keywords'"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": 3}]}, "wrong value"),
        (
            {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": "abc"}]},
            "must be a list of words, not 'abc'",
        ),
        (
            {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": []}]},
            "must be a list of words, not []",
        ),
        (
            {"instruction_id_list": ["keywords:forbidden_words"], "kwargs": [{"forbidden_words": "abc"}]},
            "must be a list of words, not 'abc'",
        ),
        (
            {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "zh"}]},
            "no language has the code 'zh'; the codes are af, ar,",
        ),
        ({"instruction_id_list": ["language:response_language"], "kwargs": [{}]}, "needs the argument 'language'"),
        (
            {
                "instruction_id_list": ["length_constraints:number_words"],
                "kwargs": [{"num_words": 3, "relation": "most"}],
            },
            "relation 'most'",
        ),
    ],
)
def test_row_with_an_unknown_constraint_is_refused(reference: dict[str, Any], fault: str) -> None:
    assert fault in str(find_reference_fault(InstructionsReward(), reference))
    assert find_reference_fault(InstructionsReward(), ROW) is None


AMBIGUOUS = "Hotel Taxi"


def test_detected_language_of_a_text_is_always_the_same() -> None:
    """langdetect guesses the language of an ambiguous text at random; the scorer must find the same language each
    time.
    """
    assert len({detect_language(AMBIGUOUS) for _ in range(20)}) == 1
    assert list_languages() == sorted(list_languages())


@pytest.fixture
def no_langdetect(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "langdetect", None)
    language._load_factory.cache_clear()
    yield
    language._load_factory.cache_clear()


@pytest.mark.usefixtures("no_langdetect")
def test_rows_with_a_language_are_refused_without_langdetect() -> None:
    row = {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "de"}]}
    fault = "the package langdetect is missing; pip install 'rollflow[languages]', or remove the row"
    assert find_reference_fault(InstructionsReward(), row) == fault
    assert find_reference_fault(InstructionsReward(), ROW) is None
    verifier = build_verifier(InstructionsReward())
    assert score_response(verifier, "all", "Das ist gut.", row).outcome is Outcome.UNJUDGED
    assert score_response(verifier, "all", "A cat and a dog", ROW).value == 1.0


@pytest.mark.parametrize("name", ["change_case:english_capital", "change_case:english_lowercase"])
@pytest.mark.usefixtures("no_langdetect")
def test_letter_case_checks_need_no_language_package(name: str) -> None:
    """A score must not depend on installed packages, so these checks do not detect the language."""
    text = "DER HUND" if name.endswith("capital") else "der hund"
    assert check_constraint(name, text, {})
