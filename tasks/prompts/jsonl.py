"""Your own prompts: one JSON object a line with `question` and `answer`; further keys go to the verifier."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from pathlib import Path

from rollflow.storage.errors import ConfigError
from rollflow.tasks.prompts.source import Question
from rollflow.tasks.settings import JsonlPrompts


class JsonlSource:
    """`QuestionSource` over a file: every pass visits each training line once, in an order of its own."""

    def __init__(self, config: JsonlPrompts, seed: int) -> None:
        self.domain = config.domain
        self._seed = seed
        lines = self._read(config)
        random.Random(f"{seed}:split").shuffle(lines)
        kept = int(len(lines) * config.held_out)
        held = {q.text for q in lines[:kept]}
        self._held = lines[:kept]
        self._lines = [q for q in lines[kept:] if q.text not in held]
        if not self._lines:
            raise ConfigError(f"prompts.path = {config.path!r}: no line is left to train on; lower prompts.held_out")

    def training(self, position: int) -> Question:
        """See `QuestionSource`."""
        return self._at(position, "training")

    def demonstration(self, position: int) -> Question:
        """See `QuestionSource`."""
        return self._at(position, "demonstration")

    def held_out(self, count: int) -> list[Question]:
        """See `QuestionSource`."""
        return self._held[:count]

    def _at(self, position: int, stream: str) -> Question:
        epoch, place = divmod(position, len(self._lines))
        return self._lines[_order(f"{self._seed}:{stream}:{epoch}", len(self._lines))[place]]

    @staticmethod
    def _read(config: JsonlPrompts) -> list[Question]:
        try:
            text = Path(config.path).expanduser().read_text()
        except OSError as error:
            raise ConfigError(f"prompts.path = {config.path!r} cannot be read: {error.strerror}; name a file") from None
        found = []
        for number, line in enumerate(text.splitlines(), 1):
            try:
                row = json.loads(line)
                found.append(Question(str(row["question"]), str(row["answer"]), {"family": None, **row}))
            except (ValueError, KeyError, TypeError):
                raise ConfigError(
                    f"prompts.path = {config.path!r}: line {number} has no question and answer; correct that line"
                ) from None
        return found


@lru_cache(maxsize=8)
def _order(seed: str, count: int) -> list[int]:
    """The order of one pass over `count` lines."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order
