"""Tests that no question key is in both training and evaluation, whatever the prompt sources of a run are."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.tasks.prompts.base import Question
from rollflow.tasks.prompts.config import (
    ColumnSumsPrompts,
    ImportPrompts,
    JsonlPrompts,
    PromptConfig,
    ReasoningGymPrompts,
    SortingPrompts,
)
from rollflow.tasks.prompts.keys import normalise_text, unordered_key
from rollflow.tasks.prompts.near_duplicates import NearDuplicates, near_duplicates
from rollflow.tasks.prompts.run_prompts import RunPrompts
from tests.support.counts import examples
from tests.support.user_code import FOLDER, put_in_reach

SUMS = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
ASKED = 200


def encode(text: str, chat: bool, system: str | None) -> list[int]:
    return list(text.encode())


def spelled(text: str, draw: random.Random) -> str:
    """Spell a question as another author would."""
    text = draw.choice([str.upper, str.title, str])(text)
    blank = draw.choice([" ", "  ", "\t", "\u00a0", "\u3000"])
    return (
        draw.choice(["", " ", "\u201c"]) + text.replace(" ", blank) + draw.choice(["", ".", " ?", "\u2026", "\u201d!"])
    )


def file_of(number: int) -> bytes:
    """Make 100 lines that ask 40 questions, in several spellings; files 0 and 1 share half of them."""
    draw = random.Random(number)
    lines = [(spelled(f"what is {i % 40 + 20 * number} and one", draw), i % 40 + 20 * number + 1) for i in range(100)]
    return "".join(json.dumps({"question": text, "answer": answer}) + "\n" for text, answer in lines).encode()


def read(config: JsonlPrompts) -> bytes:
    return file_of(int(config.path))


SOURCES: list[PromptConfig] = [
    ReasoningGymPrompts(family="chain_sum", options=SUMS),
    ReasoningGymPrompts(family="chain_sum", options={**SUMS, "max_terms": 4}),
    ReasoningGymPrompts(
        family="basic_arithmetic",
        options={**SUMS, "operators": ["+"], "allow_parentheses": False, "allow_negation": False},
    ),
    ReasoningGymPrompts(family="gcd", options={"min_value": 1, "max_value": 30}),
    ReasoningGymPrompts(family="number_sorting", options={"min_numbers": 3, "max_numbers": 3, "max_value": 9}),
    ColumnSumsPrompts(min_digits=1, max_digits=1),
    ColumnSumsPrompts(min_digits=1, max_digits=2),
    SortingPrompts(digits=3),
    SortingPrompts(digits=3, held_out=0.4),
    JsonlPrompts(path="0", held_out=0.2),
    JsonlPrompts(path="1", held_out=0.3),
    ImportPrompts(path="letters.prompts:LetterCounts", options={"alphabet": "abc", "length": 4}),
]


def keys(asked: Iterable[Question]) -> set[str]:
    return {key for question in asked for key in (question.canonical_key, normalise_text(question.text))}


def numbers_and_words(asked: Iterable[Question]) -> set[tuple[str, ...]]:
    """Return a second kind of key for each question: its sorted words and signs, with its answer."""
    return {(*sorted(re.findall(r"\w+|[-+]", q.text.casefold())), str(q.reference["answer"])) for q in asked}


@pytest.fixture(scope="module", autouse=True)
def _letters() -> Iterable[None]:
    with pytest.MonkeyPatch.context() as patch:
        put_in_reach(patch, FOLDER)
        yield


@pytest.mark.many
@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.sampled_from(SOURCES), min_size=1, max_size=4), st.integers(0, 2**20), st.integers(1, 80))
def test_no_question_key_is_both_held_out_and_trained_on(configs: list[PromptConfig], seed: int, held_out: int) -> None:
    made = RunPrompts(configs, seed, held_out, encode, 10_000, read)
    share = -(-held_out // len(configs))
    held = [question for source in made.sources for question in source.held_out(share)]
    asked = [source.training(i) for source in made.sources for i in range(ASKED)]
    asked += [source.demonstration(i) for source in made.sources for i in range(ASKED)]
    assert held
    assert not keys(held) & keys(asked)
    sums = [q for q in held if re.search(r"\d \+ \d", q.text)]
    assert not numbers_and_words(sums) & numbers_and_words(asked)
    assert all(made.is_held_out(which, question) for question in held for which in range(len(configs)))


@pytest.mark.parametrize("number", [0, 1])
def test_no_file_trains_on_questions_held_out_by_another(number: int) -> None:
    """Each of the two files holds out questions that are also in the other file."""
    configs = [JsonlPrompts(path="0", held_out=0.3), JsonlPrompts(path="1", held_out=0.3)]
    made = RunPrompts(configs, 0, 40, encode, 200, read)
    alone = RunPrompts([configs[number]], 0, 20, encode, 200, read)
    held = keys(made.sources[1 - number].held_out(100))
    assert held & keys(alone.sources[0].training(i) for i in range(ASKED))
    assert not held & keys(made.sources[number].training(i) for i in range(ASKED))


@pytest.mark.parametrize(
    "text", ["What is 3 + 5?", "what  is 3 + 5", " WHAT IS\t3 + 5 ?!", "\u201cWhat is \uff13 + 5\u201d"]
)
def test_spellings_of_a_question_have_the_same_key(text: str) -> None:
    assert normalise_text(text) == "what is 3 + 5"


@pytest.mark.parametrize(("one", "other"), [("-5 + 3", "5 + 3"), ("f(x)", "f(x"), ("?", "!"), ("a b", "ab")])
def test_different_questions_have_different_keys(one: str, other: str) -> None:
    assert normalise_text(one) != normalise_text(other)


def test_question_with_reordered_numbers_has_the_same_key() -> None:
    assert unordered_key("3 + 5 + 1 =", "9") == unordered_key("1 + 3 + 5 =", "9")
    assert unordered_key("5 - 3", "2") != unordered_key("3 - 5", "-2")
    assert unordered_key("0 1\n1 1", "yes") != unordered_key("1 1\n0 1", "yes")


def test_sum_has_the_same_key_in_every_wording() -> None:
    options = {**SUMS, "operators": ["+"], "allow_parentheses": False, "allow_negation": False}
    plain, natural = (
        RunPrompts(
            [ReasoningGymPrompts(family="basic_arithmetic", options={**options, "format_style": style})],
            0,
            1,
            None,
            0,
            read,
        )
        for style in ("simple", "natural")
    )
    for position in range(20):
        one, other = plain.question(position), natural.question(position)
        assert re.findall(r"\d", one.text) == re.findall(r"\d", other.text)
        assert one.canonical_key == other.canonical_key


# Hashes of questions from runs before question keys existed: 600 training questions, 300 demonstrations, and the
# held-out questions.
LINES = "".join(
    json.dumps({"question": f"{'What is ' if i % 3 else 'what  is '}{i % 50 + 1} + {i % 7}?", "answer": i}) + "\n"
    for i in range(120)
).encode()
FILE = JsonlPrompts(path="mine.jsonl", held_out=0.2)
RECORDED: list[tuple[str, list[PromptConfig], str]] = [
    ("reasoning-gym", [SOURCES[0]], "e63fba8be6aa5b179dd4a444828ebbd500449d67610506e2e49685cc8f922a0c"),
    ("jsonl", [FILE], "0e76a28a9f842af58a1e3478c002f2022abc1ad5b9e8734ca5e9f3917410cc73"),
    ("column-sums", [SOURCES[5]], "6df0ecf200afcb8bb8325eed9d30d7f4720684f0b5b2450f3b0bec6113bebd36"),
    (
        "mixed",
        [SOURCES[0], FILE, SOURCES[0].model_copy(update={"share": 3.0})],
        "0e46154fa8954b4973545a7e6d13c3261b3f8e3f58d0fc6137d82239ca4c026a",
    ),
]


@pytest.mark.parametrize(("configs", "recorded"), [case[1:] for case in RECORDED], ids=[case[0] for case in RECORDED])
def test_held_out_split_by_text_matches_recorded_runs(configs: list[PromptConfig], recorded: str) -> None:
    made = RunPrompts(configs, 3, 60, encode, 200, lambda config: LINES, "text")
    asked = [made.prompt(i).text for i in range(600)] + [made.demonstration(i)[0].text for i in range(300)]
    asked += [prompt.text for prompt in made.held_out()]
    assert hashlib.sha256(json.dumps(asked).encode()).hexdigest() == recorded


def test_held_out_split_by_text_trains_on_reordered_questions() -> None:
    """Only question keys prevent this: with a split by text, many held-out sums are trained on with their numbers in
    another order.
    """
    made = RunPrompts([SOURCES[0]], 0, 256, encode, 200, read, "text")
    source = made.sources[0]
    held = source.held_out(256)
    assert not {q.text for q in held} & {source.training(i).text for i in range(3000)}
    twins = {q.canonical_key for q in held} & {source.training(i).canonical_key for i in range(3000)}
    assert len(twins) > 100


def words(rows: Iterable[tuple[str, int]]) -> bytes:
    return "".join(json.dumps({"question": text, "answer": answer}) + "\n" for text, answer in rows).encode()


def count(content: bytes, trained: int = 1000, seconds: float = 60.0) -> NearDuplicates:
    made = RunPrompts([JsonlPrompts(path="x", held_out=0.25)], 0, 1000, None, 0, lambda config: content)
    return near_duplicates(made, trained, seconds)


def story(number: int, bought: object) -> str:
    draw = random.Random(number)
    names = [draw.choice("abcdefghij") + str(draw.randrange(10**6)) for _ in range(14)]
    return f"How much is it? {' '.join(names)} bought {bought} and went home."


def test_near_duplicates_of_held_out_questions_are_counted() -> None:
    """Each story occurs twice, with two different numbers; the two copies share 14 of 17 three-word sequences."""
    twice = count(words((story(i // 2, i), i) for i in range(80)))
    once = count(words((story(i, i), i) for i in range(80)))
    assert twice.held_out == once.held_out == 20
    assert once.found == 0
    assert twice.found >= 10  # of some stories, both copies are held out
    assert twice.sentence().startswith(f"{twice.found} of 20 held-out prompts have a near duplicate among ")


def test_template_words_make_no_near_duplicates() -> None:
    assert count(words((f"What is the best price of the item called {i}, please?", i) for i in range(80))).found == 0


def test_near_duplicates_of_a_large_file_are_found_quickly() -> None:
    content = words((story(i, i), i) for i in range(3000))
    assert count(content, seconds=0.0).looked_at == 0
    assert count(content, trained=7).looked_at == 7
