"""A question source that reads user-defined prompts from a file with one JSON object per line, with the keys `question`
and `answer`.

The whole JSON object of a line is the reference for the verifier.

A prompt file is encoded in UTF-8, with or without a byte order mark; blank lines are ignored.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from rollflow.storage.errors import ConfigError
from rollflow.tasks.prompts.base import Asked, Message, Question, Reader
from rollflow.tasks.prompts.config import FileBase, FilePrompts
from rollflow.tasks.prompts.held_out import HeldOut
from rollflow.tasks.prompts.messages import describe_asked, read_asked
from rollflow.tasks.prompts.near_index import NearIndex


def read_bytes(config: FileBase, path: str) -> bytes:
    """Read a file of a question source; raise `ConfigError` if the file cannot be read."""
    try:
        file = Path(path).expanduser()
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise ValueError("it is not a regular file")  # reading a pipe or a device might never end
        return file.read_bytes()
    except (OSError, ValueError, RuntimeError) as error:  # an invalid path, or an unknown home directory
        why = getattr(error, "strerror", None) or error
        within = "" if path == config.path else f": {Path(path).name}"
        raise ConfigError(f"prompts.path = {config.path!r}{within} cannot be read: {why}; name a file") from None


class JsonlSource:
    """A `QuestionSource` that reads a prompt file, and asks every training line once per epoch, in random order.

    The held-out questions are a share of the lines, or all lines of another file.
    """

    def __init__(self, config: FileBase, seed: int, read: Reader, excluded: HeldOut) -> None:
        self._config, self._seed, self._excluded = config, seed, excluded
        lines = read_questions(config, read(config))
        random.Random(f"{seed}:split").shuffle(lines)
        if (other := config.held_out_file) is not None:
            held, self._others = read_questions(other, read(other)), lines
        else:
            kept = int(len(lines) * config.held_out)
            held, self._others = lines[:kept], lines[kept:]
        self._left_out: dict[str, int] = {}  # reason why rows are not trained on -> number of rows
        self._held = {excluded.identity(question): question for question in held}
        self.sets = {name: read_questions(file, read(file)) for name, file in config.set_files.items()}
        for question in [*held, *(one for questions in self.sets.values() for one in questions)]:
            excluded.add(question)

    @cached_property
    def _lines(self) -> list[Question]:
        """The training questions: those that no source of the run holds out, after the choice by `difficulty` and
        `near_duplicates`.
        """
        lines = [question for question in self._others if question not in self._excluded]
        self._left_out["their question is held out"] = len(self._others) - len(lines)
        if (limits := self._config.difficulty) is not None:
            kept = [one for one in lines if limits.contains(read_difficulty(self._config, one.reference))]
            self._left_out[f"they are outside prompts.difficulty ({limits})"] = len(lines) - len(kept)
            lines = kept
        if self._config.near_duplicates == "drop":
            index = NearIndex(self._excluded.questions)
            kept = [question for question in lines if not index.find(question)]
            self._left_out["they are near duplicates of held-out questions"] = len(lines) - len(kept)
            lines = kept
        if not lines:
            raise self._config.refusal(self._describe_shortage())
        return lines

    def _describe_shortage(self) -> str:
        """Return why no line is left to train on, with a remedy for the most frequent reason."""
        left_out = {why: count for why, count in self._left_out.items() if count}
        most = max(left_out, key=left_out.__getitem__, default="")
        remedy = "lower prompts.held_out or give more lines"
        if "prompts.difficulty" in most:
            remedy = "widen prompts.difficulty"
        elif "near duplicates" in most:
            remedy = 'set prompts.near_duplicates = "count"'
        elif self._config.held_out_file is not None:
            remedy = "name another file or split"
        counts = "".join(
            f"; {count} of {len(self._others)} are left out because {why}" for why, count in left_out.items()
        )
        return f"no line of the file is left to train on{counts}; {remedy}"

    def training(self, position: int) -> Question:
        """Return the training question at `position`."""
        return self._at(position, "training")

    def demonstration(self, position: int) -> Question:
        """Return the question to demonstrate at `position`."""
        return self._at(position, "demonstration")

    def held_out(self, count: int) -> list[Question]:
        """Return the first `count` held-out questions."""
        return list(self._held.values())[:count]

    def evaluation_set(self, name: str, count: int) -> list[Question]:
        """Return the first `count` distinct questions of an evaluation set."""
        distinct = {self._excluded.identity(question): question for question in self.sets[name]}
        return list(distinct.values())[:count]

    @property
    def count(self) -> int:
        """Number of training questions."""
        return len(self._lines)

    def order(self, epoch: int) -> Sequence[int]:
        """Return the numbers of all training questions in the order of this epoch."""
        return _shuffle_lines(f"{self._seed}:training:{epoch}", len(self._lines))

    def describe_rows(self) -> str:
        """Return a sentence that says how many rows are trained on, held out, and left out, and why."""
        unit, asked = self._config.unit, Counter(question.canonical_key for question in self._lines)
        repeated = len(self._lines) - len(asked)
        left_out = [f"{count:,} {unit}s are left out because {why}" for why, count in self._left_out.items()]
        return (
            f"{self._config.key} = {self._config.path!r}: {len(self._lines):,} {unit}s are trained on, of which "
            f"{repeated:,} repeat a question; {len(self._held):,} questions are held out, and {', '.join(left_out)}"
        )

    def _at(self, position: int, stream: str) -> Question:
        epoch, place = divmod(position, len(self._lines))
        return self._lines[_shuffle_lines(f"{self._seed}:{stream}:{epoch}", len(self._lines))[place]]


def read_questions(config: FileBase, content: bytes) -> list[Question]:
    """Return the questions of a prompt file in the order of its lines; raise `ConfigError` for the first invalid
    line.

    `rows.py` checks the lines of a new run more strictly. The questions of a file must never change, because restarted
    runs read their prompt files again.
    """
    return [_read_question(config, number, line) for number, line in numbered_lines(config, content)]


def numbered_lines(config: FileBase, content: bytes) -> list[tuple[int, str]]:
    """Return the non-blank lines of a prompt file with line numbers from 1; raise `ConfigError` if there are none."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, cure = content.count(b"\n", 0, error.start) + 1, "save the file as UTF-8"
        raise config.refusal(f"line {line}: byte {error.start} is not UTF-8; {cure}") from None
    # `splitlines` would also split at Unicode line separators, which a JSON string may contain.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise config.refusal(f"the file has no {config.unit}s; name a file with at least one {config.unit}")
    return lines


def judged_part(config: FileBase, answer: str) -> str:
    """Return the part of a reference answer that is compared with responses; raise `ValueError` if the answer lacks the
    text `answer_after`.
    """
    mark = config.answer_after
    if mark and mark not in answer:
        raise ValueError(
            f"the answer does not contain {mark!r}, the text of prompts.answer_after; correct the answer or the key"
        )
    return answer.rpartition(mark)[2].strip() if mark else answer


def read_difficulty(config: FileBase, row: Mapping[str, Any]) -> float:
    """Return the difficulty of a row, from the column that `prompts.difficulty` names; raise `ValueError` if the column
    has no number.

    The number may be written as text, as in a CSV file.
    """
    assert config.difficulty is not None
    name = config.difficulty.column
    value = row.get(name)
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float | str) else float(value)
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"the column {name!r}, which prompts.difficulty names, contains {json.dumps(value)[:40]}, which is "
            "not a number; correct it"
        )
    return number


def _read_question(config: FileBase, number: int, line: str) -> Question:
    try:
        row = json.loads(line)
        asked = read_asked(config, row) if isinstance(config, FilePrompts) else str(row["question"])
        if isinstance(config, FilePrompts) and "answer" not in row:
            return Question(describe_asked(asked), "", {"family": None, **row}, messages=_list_messages(asked))
        question, answer = describe_asked(asked), str(row["answer"])
        (question + answer).encode()  # raises an error for lone surrogates, which JSON allows
        if question.strip() and row["question"] is not None and row["answer"] is not None:
            row = row if config.answer_after is None else {**row, "answer": judged_part(config, answer)}
            reference = {"family": None, **row}
            return Question(question, judged_part(config, answer), reference, messages=_list_messages(asked))
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise config.refusal(f"{config.unit} {number} must have a question and an answer; correct it")


def _list_messages(asked: Asked) -> Sequence[Message]:
    return () if isinstance(asked, str) else asked


@lru_cache(maxsize=8)
def _shuffle_lines(seed: str, count: int) -> list[int]:
    """Return a random order of `count` lines that depends only on `seed`."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order
