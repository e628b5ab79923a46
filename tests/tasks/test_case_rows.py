"""Tests of the check of test cases before a run: the error about a case that no program can pass names its row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollflow.flows.config import parse_config
from rollflow.storage.errors import ConfigError
from rollflow.tasks.prompts.tables import read_file
from rollflow.tasks.run.prompt_check import read_files
from rollflow.tasks.scorers.code.cases import read_case

PYTEST = "from solution import f\ndef test_f():\n    assert f(1) == 2\n"
GOOD: list[dict[str, Any]] = [
    {"stdin": "1", "stdout": "2"},
    {"call": "f", "args": [1], "expected": None},
    {"assert": "assert f(1) == 2"},
]
GOOD.append({"pytest": PYTEST})


def read(path: Path, **keys: Any) -> list[Any]:
    tree = {"prompts": [{"kind": "file", "path": str(path), **keys}], "policy": {"path": "a/b"}}
    [rows] = read_files(parse_config(tree | {"reward": {"kind": "code"}}), read_file).values()
    return [row.reference["cases"] for row in rows]


def write(folder: Path, *cases: Any) -> Path:
    """Write a row for each list of cases; a row needs no answer, because the scorer does not read it."""
    lines = (json.dumps({"question": "Add one.", "cases": found}) + "\n" for found in cases)
    (path := folder / "mine.jsonl").write_text("".join(lines))
    return path


WRONG: list[tuple[Any, str]] = [
    (None, 'the row has no list of test cases in its column "cases"'),
    ([], 'the row has no list of test cases in its column "cases"'),
    (json.dumps(GOOD), 'the column "cases" is text, not a list; if it is JSON, name it in prompts.json_columns'),
    ([GOOD[0], {"stdin": "1"}], "case 2 of 2: a test case has the keys stdin, but must have"),
    (["assert f(1)"], "case 1 of 1: a test case is 'assert f(1)', but must be an object"),
    ([{"stdin": "1", "stdout": 2}], "case 1 of 1: 'stdout' of a test case is 2, but must be text"),
    ([{"stdin": "\ud800", "stdout": "2"}], "case 1 of 1: 'stdin' of a test case contains half of a surrogate pair"),
    ([{"call": "f", "args": 1, "expected": 2}], "case 1 of 1: 'args' of a test case is 1, but must be a list"),
    ([{"call": "f", "named": [1], "expected": 2}], "case 1 of 1: 'named' of a test case is [1], but must be an object"),
    (
        [{"call": "f", "tolerance": "1", "expected": 2}],
        "case 1 of 1: 'tolerance' of a test case is '1', but must be a number",
    ),
    ([{"call": "f", "expected": float("nan")}], "case 1 of 1: a test case contains NaN or infinity"),
    ([{"call": 1, "expected": 2}], "case 1 of 1: 'call' of a test case is 1, but must be text"),
    ([{"call": "_f", "expected": 2}], "case 1 of 1: 'call' of a test case is '_f', but must be the name of a function"),
    ([{"call": "C().f", "expected": 2}], "case 1 of 1: 'call' of a test case is 'C().f', but must be the name"),
    ([{"assert": "candidate()", "entry": "f g"}], "case 1 of 1: 'entry' of a test case is 'f g', but must be the name"),
    ([{"call": "f", "tolerance": -1, "expected": 2}], "case 1 of 1: the 'tolerance' of a test case is -1, but must be"),
    ([{"call": "f", "tolerance": 10**400, "expected": 2}], "case 1 of 1: the 'tolerance' of a test case is 1000"),
    ([GOOD[0], {"assert": "assert f(1"}], "case 2: its code is no Python ('(' was never closed in line 1)"),
    ([{"pytest": 1}], "case 1 of 1: 'pytest' of a test case is 1, but must be text"),
    ([{"pytest": PYTEST, "stdin": "1"}], "case 1 of 1: a test case has the keys pytest, stdin, but must have"),
    ([GOOD[0], {"pytest": f"{PYTEST}("}], "case 2: its code is no Python ('(' was never closed in line 4)"),
    ([{"pytest": "import solution"}], "case 1: its pytest file defines no function test_...; add one, at the top"),
    ([{"pytest": "def test_f(): pass"}], "case 1: its pytest file does not import the module solution"),
    ([{"pytest": f"import numpy\n{PYTEST}"}], "case 1: its pytest file imports numpy, which is not in Python's"),
    ([{"stdin": "1", "checker": "if"}], "case 1: its code is no Python (invalid syntax in line 1)"),
]


@pytest.mark.parametrize(("cases", "words"), WRONG)
def test_malformed_test_case_is_refused_with_its_row(cases: Any, words: str, tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, cases)
    with pytest.raises(ConfigError) as refused:
        read(path)
    assert str(refused.value).startswith(f"prompts.path = {str(path)!r}: line 2: {words}")
    assert "\n" not in str(refused.value)


NAMED = {"reward": {"kind": "code", "adaptive": {"min_seconds": 1.0, "reference_column": "seconds"}}}
UNUSABLE = "which is no positive number of seconds; correct the value, or use null"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "the row has no such column; add it (null if no time is known), or correct the key"),
        ({"seconds": 0}, f"the row has 0, {UNUSABLE}"),
        ({"seconds": -1.5}, f"the row has -1.5, {UNUSABLE}"),
        ({"seconds": float("nan")}, f"the row has NaN, {UNUSABLE}"),
        ({"seconds": float("inf")}, f"the row has Infinity, {UNUSABLE}"),
        ({"seconds": True}, f"the row has true, {UNUSABLE}"),
        ({"seconds": "fast"}, f'the row has "fast", {UNUSABLE}'),
        ({"seconds": [1.0]}, f"the row has [1.0], {UNUSABLE}"),
        ({"seconds": 10**400}, f"the row has {str(10**400)[:40]}, {UNUSABLE}"),
    ],
)
def test_unusable_reference_seconds_are_refused_with_their_row(
    more: dict[str, Any], words: str, tmp_path: Path
) -> None:
    rows = [{"question": f"Add {n}.", "cases": GOOD} for n in range(3)]
    times: list[dict[str, Any]] = [{"seconds": 0.5}, {"seconds": None}, more]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row | time) + "\n" for row, time in zip(rows, times, strict=True)))
    tree = {"prompts": [{"kind": "file", "path": str(path)}], "policy": {"path": "a/b"}}
    with pytest.raises(ConfigError) as refused:
        read_files(parse_config(tree | NAMED), read_file)
    where = 'reward.adaptive.reference_column = "seconds"'
    assert str(refused.value) == f"prompts.path = {str(path)!r}: line 3: {where}: {words}"


def test_error_names_the_section_of_the_reference_column(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    tree = {"prompts": [{"kind": "file", "path": str(path), "reward": "mine"}], "policy": {"path": "a/b"}}
    with pytest.raises(ConfigError, match=r'line 1: rewards\.mine\.adaptive\.reference_column = "seconds": the row'):
        read_files(parse_config(tree | {"rewards": {"mine": NAMED["reward"]}}), read_file)


def test_test_cases_in_a_table_are_read_as_lists_or_json(tmp_path: Path) -> None:
    """In a Parquet file, every case has the keys of all forms. The keys of other forms are null."""
    forms = [{"stdin": "1", "stdout": "2"}, {"assert": "assert f(1) == 2"}, {"call": "f", "expected": 2}]
    pq.write_table(pa.Table.from_pylist([{"question": "Add one.", "cases": forms}]), tmp_path / "mine.parquet")
    [(*printed, called)] = read(tmp_path / "mine.parquet")
    assert called == {"stdin": None, "stdout": None, "assert": None, "call": "f", "expected": 2}
    assert [read_case(case) for case in (*printed, called)] == [read_case(case) for case in forms]


def test_test_cases_in_a_csv_file_are_json(tmp_path: Path) -> None:
    quoted = json.dumps(GOOD).replace('"', '""')
    (tmp_path / "mine.csv").write_text(f'question,cases\nAdd one.,"{quoted}"\n')
    assert read(tmp_path / "mine.csv", json_columns=["cases"]) == [GOOD]
    (tmp_path / "mine.csv").write_text(f'question,cases\nAdd one.,"{quoted}"\nAdd two.,[{{\n')
    with pytest.raises(ConfigError, match=r"line 3: column 'cases' is no JSON \(Expecting .*\); correct it"):
        read(tmp_path / "mine.csv", json_columns=["cases"])


@pytest.mark.parametrize("change", [{"reward": {"kind": "exact"}}, {"policy": {"cold_start": {}}}])
def test_missing_answer_is_refused_if_the_scorer_needs_it(change: dict[str, Any], tmp_path: Path) -> None:
    """The scorer `exact` compares answers, and a cold start trains on them."""
    (path := tmp_path / "mine.csv").write_text("question,solution\n1 + 1,2\n")
    tree = {"prompts": [{"kind": "file", "path": str(path)}], "reward": {"kind": "code"}, "policy": {"path": "a/b"}}
    with pytest.raises(ConfigError, match=r"line 2: it has no answer, only 'solution'; write one into its row"):
        read_files(parse_config(tree | change), read_file)
