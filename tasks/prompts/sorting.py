"""Digits to sort. The reference solution is Python's `sorted`.

    Sort 31415.
    11345

The multisets of digits are split once, by the run's seed: a multiset that is held out is never asked in training nor
demonstrated, in any order of its digits. All held-out multisets are questions; an evaluation takes the first of them.
"""

from __future__ import annotations

import random
from itertools import combinations_with_replacement

from rollflow.storage.errors import ConfigError
from rollflow.tasks.prompts.base import Question
from rollflow.tasks.prompts.config import SortingPrompts

DIGITS = "0123456789"


class SortingSource:
    """`QuestionSource` of digits to sort; the question at a position is drawn from the seed, its stream and position."""

    def __init__(self, config: SortingPrompts, seed: int) -> None:
        self._seed = seed
        multisets = ["".join(digits) for digits in combinations_with_replacement(DIGITS, config.digits)]
        random.Random(f"{seed}:split").shuffle(multisets)
        kept = int(len(multisets) * config.held_out)
        self._asked = multisets[kept:]
        self._held = [self._question("held out", place, multiset) for place, multiset in enumerate(multisets[:kept])]

    def training(self, position: int) -> Question:
        """See `QuestionSource`."""
        return self._drawn("training", position)

    def demonstration(self, position: int) -> Question:
        """See `QuestionSource`."""
        return self._drawn("demonstration", position)

    def held_out(self, count: int) -> list[Question]:
        """See `QuestionSource`."""
        return self._held[:count]

    def _drawn(self, stream: str, position: int) -> Question:
        return self._question(stream, position, None)

    def _question(self, stream: str, position: int, multiset: str | None) -> Question:
        draw = random.Random(f"{self._seed}:{stream}:{position}")
        digits = list(multiset or draw.choice(self._asked))
        draw.shuffle(digits)
        return question("".join(digits))


def question(digits: str) -> Question:
    """The question that asks for `digits` in ascending order."""
    answer = "".join(sorted(digits))
    return Question(f"Sort {digits}.", answer, {"family": None, "answer": answer})
