"""Parses and checks the rows of a prompt file before a run begins.

Each row is a JSON object, with a text as `question`, and a text or an integer as `answer`. Error messages name the line
of the first invalid row and the number of rows with the same fault.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollflow.storage.errors import ConfigError
from rollflow.tasks.prompts.base import Asked
from rollflow.tasks.prompts.config import FileBase, FilePrompts
from rollflow.tasks.prompts.jsonl import judged_part, numbered_lines, read_difficulty
from rollflow.tasks.prompts.messages import find_question_fault, read_asked

DEEPEST = 100  # deepest nesting of a row; a row that is nested more deeply cannot be sent to another process
LONGEST_SHOWN = 40  # largest number of characters of a value that an error message shows
NAMES = {bool: "true or false", type(None): "null", list: "a list", dict: "an object", int: "a number"}
Fault = Callable[[Mapping[str, Any]], str | None]


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One row of a prompt file: the line number, the question, and the reference for the verifier."""

    line: int
    question: Asked
    reference: Mapping[str, Any]


def read_rows(config: FileBase, content: bytes, fault: Fault = lambda reference: None) -> list[PromptRow]:
    """Parse every row of a prompt file. `fault` returns what is wrong with the reference of a row, or None.

    Raises:
        ConfigError: a row of the prompt file is invalid; the message names the line of the first invalid row.
    """
    rows, faults = list[PromptRow](), list[tuple[int, str]]()
    for number, line in numbered_lines(config, content):
        found = _read_row(config, number, line)
        if isinstance(found, PromptRow) and (wrong := fault(found.reference)) is None:
            rows.append(found)
        else:
            faults.append((number, found if isinstance(found, str) else str(wrong)))
    if faults:
        raise refuse_lines(config, faults)
    return rows


def refuse_lines(config: FileBase, faults: list[tuple[int, str]]) -> ConfigError:
    """Build the error that names the first invalid line of a prompt file and counts the other invalid lines."""
    first, what = faults[0]
    kinds = Counter(_kind(fault) for _, fault in faults)
    alike = kinds[_kind(what)]
    counts = [f"{alike} such {config.unit}s"] if alike > 1 else []
    counts += [f"{len(faults) - alike} with other faults"] if len(faults) > alike else []
    return config.refusal(f"{config.unit} {first}: {what}{_in_brackets(counts)}")


def shorten_value(value: object) -> str:
    """Shorten a value from a prompt file for an error message."""
    text = json.dumps(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _in_brackets(counts: list[str]) -> str:
    return f" ({', '.join(counts)})" if counts else ""


def _kind(fault: str) -> str:
    """Return a fault without the invalid value in brackets, so that equal faults can be counted together."""
    return fault.partition(" (")[0]


def _read_row(config: FileBase, number: int, line: str) -> PromptRow | str:
    """Parse a row of a prompt file. If the row is invalid, return a sentence that says why."""
    if max(line.count("["), line.count("{")) > DEEPEST and _compute_depth(line) > DEEPEST:
        return f"it is nested more than {DEEPEST} levels deep; flatten it"
    twice = list[str]()

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return found

    try:
        row = json.loads(line, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        return f"it is no JSON ({error}); write one object a line"
    if not isinstance(row, dict):
        return "it is no JSON object; write {" + '"question": ..., "answer": ...}'
    if twice:
        return f"a key is repeated ({twice[0]}); keep one"
    if wrong := _find_question_fault(config, row) or _find_answer_fault(config, row):
        return wrong
    asked = read_asked(config, row) if isinstance(config, FilePrompts) else row["question"]
    if config.difficulty is not None:
        try:
            read_difficulty(config, row)
        except ValueError as error:
            return str(error)
    if "answer" not in row:  # the column may be missing if the scorer needs no reference answer
        return PromptRow(number, asked, {"family": None, **row})
    try:
        answer = judged_part(config, str(row["answer"]))
    except ValueError as error:
        return str(error)
    return PromptRow(number, asked, {"family": None, **row, "answer": answer})


def _find_question_fault(config: FileBase, row: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a row's question, or None. A question must be text or, in a table, a list of chat
    messages.
    """
    messages = isinstance(config, FilePrompts) and isinstance(row.get("question"), list)
    if not messages and (wrong := _find_text_fault(config, row, "question")):
        return wrong
    return find_question_fault(config, row) if isinstance(config, FilePrompts) else None


def _find_answer_fault(config: FileBase, row: Mapping[str, Any]) -> str | None:
    answer = row.get("answer")
    if isinstance(answer, int) and not isinstance(answer, bool):
        return None
    if isinstance(config, FilePrompts) and "answer" not in (*row, *config.columns):
        return None
    return _find_text_fault(config, row, "answer", 'text, or an integer such as 7, which means "7"')


def _find_text_fault(config: FileBase, row: Mapping[str, Any], key: str, wanted: str = "text") -> str | None:
    """Return what is wrong with the row's value of `key`, or None; the value must be text."""
    name = config.label(key)
    if key not in row:
        return f"it has no {name}; give it one"
    value = row[key]
    if not isinstance(value, str):
        found = NAMES.get(type(value), "a number with a fraction")
        return f"{name} is {found} ({shorten_value(value)}); give {wanted}"
    try:
        value.encode()
    except UnicodeEncodeError:
        return f"{name} holds half of a surrogate pair ({shorten_value(value)}), which is not text; remove it"
    if key == "question" and not value.strip():
        return f"{name} is empty; ask something"
    return None


def _compute_depth(line: str) -> int:
    """Compute how deeply a line of JSON nests lists and objects, ignoring brackets inside strings."""
    depth = deepest = 0
    within = escaped = False
    for letter in line:
        if within:
            within, escaped = escaped or letter != '"', not escaped and letter == "\\"
        elif letter == '"':
            within = True
        elif letter in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif letter in "]}":
            depth -= 1
    return deepest
