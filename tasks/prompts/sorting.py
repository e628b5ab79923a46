"""Generates questions that ask the policy to sort digits.

    Sort 31415.
    11345

The run's seed splits the multisets of digits into two parts, for training and for evaluation. A held-out multiset is
never asked in training or demonstrated, in any order of its digits.
"""

from __future__ import annotations

import random
from itertools import combinations_with_replacement

from rollflow.storage.errors import ConfigError
from rollflow.tasks.prompts.base import Question
from rollflow.tasks.prompts.config import SortingPrompts
from rollflow.tasks.prompts.held_out import HeldOut

DIGITS = "0123456789"
TRIES = 64  # largest number of multisets of digits to draw for a position; if all are held out, the run fails


class SortingSource:
    """A `QuestionSource` of digits to sort. A question depends only on the seed, the stream (training, demonstrations
    or held-out) and the position.
    """

    def __init__(self, config: SortingPrompts, seed: int, excluded: HeldOut) -> None:
        self._seed, self._excluded = seed, excluded
        multisets = ["".join(digits) for digits in combinations_with_replacement(DIGITS, config.digits)]
        random.Random(f"{seed}:split").shuffle(multisets)
        kept = int(len(multisets) * config.held_out)
        self._others = multisets[kept:]
        self._held = [
            _shuffle(digits, self._create_generator("held out", place)) for place, digits in enumerate(multisets[:kept])
        ]
        for asked in self._held:
            excluded.add(asked)

    def training(self, position: int) -> Question:
        """Return the training question at `position`."""
        return self._find_allowed("training", position)

    def demonstration(self, position: int) -> Question:
        """Return the question to demonstrate at `position`."""
        return self._find_allowed("demonstration", position)

    def held_out(self, count: int) -> list[Question]:
        """Return the first `count` held-out questions."""
        return self._held[:count]

    def _create_generator(self, stream: str, position: int) -> random.Random:
        return random.Random(f"{self._seed}:{stream}:{position}")

    def _find_allowed(self, stream: str, position: int) -> Question:
        draw = self._create_generator(stream, position)
        for _ in range(TRIES):
            asked = _shuffle(draw.choice(self._others), draw)
            if asked not in self._excluded:
                return asked
        raise ConfigError(
            "prompts.kind = 'sorting': another source holds out all questions of this source, so none is left to "
            "train on; remove one of the two sources"
        )


def _shuffle(multiset: str, draw: random.Random) -> Question:
    digits = list(multiset)
    draw.shuffle(digits)
    return build_question("".join(digits))


def build_question(digits: str) -> Question:
    """Build the question that asks for `digits` in ascending order."""
    answer = "".join(sorted(digits))
    return Question(f"Sort {digits}.", answer, {"family": None, "answer": answer}, f"sort {answer}")
