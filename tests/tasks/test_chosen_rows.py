"""Tests of how rows become questions: choice of rows by difficulty, removal of near duplicates, and templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollflow.flows.config import parse_config
from rollflow.flows.preflight import preflight
from rollflow.storage.errors import ConfigError
from rollflow.tasks.prompts.base import Question
from rollflow.tasks.prompts.config import FilePrompts, JsonlPrompts
from rollflow.tasks.prompts.held_out import HeldOut
from rollflow.tasks.prompts.jsonl import JsonlSource
from rollflow.tasks.prompts.messages import apply_template
from rollflow.tasks.prompts.near_index import NearIndex
from rollflow.tasks.prompts.rows import read_rows
from rollflow.tasks.prompts.run_prompts import RunPrompts

ROWS = [{"question": f"q{n}", "answer": "1", "pass_rate": n / 10} for n in range(11)]


def lines(rows: Sequence[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def trained(rows: Sequence[Any], held_out: float = 0.0, **keys: Any) -> set[str]:
    """Return the questions of a file that are trained on."""
    config = JsonlPrompts(path="q.jsonl", held_out=held_out, **keys)
    source = JsonlSource(config, 0, lambda _: lines(rows), HeldOut())
    return {source.training(position).text for position in range(source.count)}


@pytest.mark.parametrize(
    ("limits", "numbers"),
    [
        ({"min": 0.2, "max": 0.4}, [2, 3, 4]),
        ({"min": 0.9}, [9, 10]),
        ({"max": 0}, [0]),
        ({"min": 0.25}, range(3, 11)),
    ],
)
def test_rows_outside_the_difficulty_range_are_left_out(limits: dict[str, float], numbers: Sequence[int]) -> None:
    assert trained(ROWS, difficulty=limits) == {f"q{n}" for n in numbers}


def test_difficulty_does_not_change_the_held_out_rows() -> None:
    plain, chosen = (
        JsonlSource(JsonlPrompts(path="q.jsonl", held_out=0.4, **keys), 0, lambda _: lines(ROWS), HeldOut())  # type: ignore[arg-type]
        for keys in ({}, {"difficulty": {"min": 0.5}})
    )
    assert plain.held_out(9) == chosen.held_out(9)
    assert {chosen.training(n).text for n in range(9)} < {plain.training(n).text for n in range(9)}


def test_difficulty_may_be_a_number_as_text_in_any_column() -> None:
    rows = [{**row, "level": str(n)} for n, row in enumerate(ROWS)]
    assert trained(rows, difficulty={"column": "level", "max": 1}) == {"q0", "q1"}


@pytest.mark.parametrize("value", [None, True, "hard", "nan", [0.5], "inf"])
def test_row_without_a_difficulty_number_is_refused(value: object) -> None:
    config = FilePrompts(path="q.jsonl", difficulty={"min": 0})  # type: ignore[arg-type]
    rows = [*ROWS[:3], {**ROWS[3], "pass_rate": value}, {"question": "q", "answer": "1"}]
    with pytest.raises(ConfigError, match=r"line 4: the column 'pass_rate', which prompts.difficulty names, contains"):
        read_rows(config, lines(rows))


def test_file_without_a_row_in_difficulty_range_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"because they are outside prompts\.difficulty \(.*\); widen prompts\.difficulty$"
    ):
        trained(ROWS, difficulty={"min": 2})


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"difficulty": {"column": "x"}}, "the difficulty has no limit; set"),
        ({"difficulty": {"min": 2, "max": 1}}, "must not be above max = 1"),
        ({"template": "Question:"}, "no place for the question"),
        ({"solved_from": 0.5}, "it needs solved_every"),
    ],
)
def test_contradictory_keys_of_prompt_rows_are_refused(keys: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_config({"prompts": [{"kind": "jsonl", "path": "q.jsonl", **keys}]})


LONG = "Tom has three red apples and buys two more in the shop, so how many apples has he"
NEAR = [{"question": f"{LONG} {end}", "answer": "5"} for end in ("now?", "today?", "in all?", "then?")]


def test_near_duplicates_are_dropped_on_request() -> None:
    rows = [*NEAR, {"question": "How deep is the sea near the old harbour of the town?", "answer": "9"}]
    assert len(trained(rows, held_out=0.2)) == 4
    kept = trained(rows, held_out=0.2, near_duplicates="drop")
    held = HeldOut()
    source = JsonlSource(JsonlPrompts(path="q", held_out=0.2), 0, lambda _: lines(rows), held)
    [question] = source.held_out(9)
    expected = {row["question"] for row in rows if row["question"] != question.text}
    assert kept == {text for text in expected if text.startswith("Tom") != question.text.startswith("Tom")}


@given(st.lists(st.text("abc ", min_size=1), min_size=1, max_size=6), st.text("abc ", min_size=1))
def test_near_duplicate_index_finds_questions_with_shared_words(held: list[str], asked: str) -> None:
    index = NearIndex([Question(text, "", {}) for text in held])
    found = index.find(Question(asked, "", {}))
    assert set(found) <= set(range(len(held)))
    for which, text in enumerate(held):
        alone = NearIndex([Question(text, "", {})])
        if which in found and len(held) == 1:
            assert alone.find(Question(asked, "", {})) == [0]
    assert NearIndex([Question(asked, "", {})]).find(Question(asked, "", {})) == [0]


def test_sums_that_share_one_sequence_are_not_near_duplicates() -> None:
    """In the first sum, only the sequence 3 + 2 is rare among the held-out sums."""
    index = NearIndex([Question(text, "", {}) for text in ("3+2+4=", "1+2+4=", "5+2+6=")])
    assert index.find(Question("7+3+2=", "", {})) == []
    assert index.find(Question("3+2+4=", "", {})) == [0]


def test_check_command_counts_rows_that_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    (tmp_path / "q.jsonl").write_bytes(lines([{**row, "pass_rate": 0.5} for row in NEAR] + ROWS * 2))
    source = {
        "kind": "jsonl",
        "path": str(tmp_path / "q.jsonl"),
        "difficulty": {"min": 0.2, "max": 0.8},
        "near_duplicates": "drop",
    }
    config = parse_config({"prompts": [source], "engine": {"max_new_tokens": 16}, "reward": {"kind": "exact"}})
    [note] = [note for note in preflight(config).notes if "are left out" in note]
    assert "lines are left out because they are outside prompts.difficulty (pass_rate, min = 0.2, max = 0.8)" in note
    assert "lines are left out because they are near duplicates of held-out questions" in note


def test_prompt_template_is_applied_to_each_question() -> None:
    asked = list[Any]()

    def encode(what: Any, chat: bool, system: str | None) -> list[int]:
        asked.append(what)
        return [1]

    config = JsonlPrompts(path="q.jsonl", held_out=0.5, template="Question: {question}\nAnswer {x}: ")
    prompts = RunPrompts([config], 0, 4, encode, 9, lambda _: lines(ROWS[:2]))
    [held], trained, (shown, _) = prompts.held_out(), prompts.prompt(0), prompts.demonstration(0)
    assert {held.text, trained.text} == {"q0", "q1"}
    assert asked == [f"Question: {one.text}\nAnswer {{x}}: " for one in (held, trained, shown)]
    assert prompts.texts(1)[0] == asked[-1]


def test_prompt_template_changes_only_the_last_message() -> None:
    config = FilePrompts(path="q.jsonl", chat=True, template="Think. {question}")
    messages = [{"role": "system", "content": "{question}"}, {"role": "user", "content": "Why?"}]
    assert apply_template(config, messages) == [messages[0], {"role": "user", "content": "Think. Why?"}]
    assert messages[1]["content"] == "Why?"
