"""Generates questions that ask for a sum of several numbers. Demonstrations add the numbers column by column.

    Add 347 + 58 + 906.
    ones 7+8=15+6=21, tens 2+4=6+5=11+0=11, hundreds 1+3=4+9=13, <answer>1311</answer>

The solution of a column starts with the carry, if any, and adds one digit at a time. The same numbers in another order
are the same question, so a held-out sum is neither asked nor demonstrated in any order.
"""

from __future__ import annotations

import random
from itertools import accumulate

from rollflow.storage.errors import ConfigError
from rollflow.tasks.prompts.base import Question
from rollflow.tasks.prompts.config import ColumnSumsPrompts
from rollflow.tasks.prompts.held_out import HeldOut

PLACES = ("ones", "tens", "hundreds", "thousands", "ten thousands", "hundred thousands")
TRIES = 64  # largest number of questions to draw for a position; if all of them are held out, the run fails


class ColumnSumsSource:
    """A `QuestionSource` of sums. A question depends only on the seed, the stream (training, demonstrations or
    held-out) and the position.
    """

    def __init__(self, config: ColumnSumsPrompts, seed: int, count: int, excluded: HeldOut) -> None:
        self._config, self._seed, self._excluded = config, seed, excluded
        self._held: dict[str, Question] = {}
        for position in range(count * 20):
            if len(self._held) == count:
                break
            asked = build_question(self._draw_terms(self._create_generator("held out", position)))
            self._held.setdefault(asked.canonical_key, asked)
        for asked in self._held.values():
            excluded.add(asked)

    def training(self, position: int) -> Question:
        """Return the training question at `position`."""
        return self._find_allowed("training", position)

    def demonstration(self, position: int) -> Question:
        """Return the question to demonstrate at `position`."""
        return self._find_allowed("demonstration", position)

    def held_out(self, count: int) -> list[Question]:
        """Return the first `count` held-out questions."""
        return list(self._held.values())[:count]

    def _create_generator(self, stream: str, position: int) -> random.Random:
        return random.Random(f"{self._seed}:{stream}:{position}")

    def _draw_terms(self, draw: random.Random) -> list[int]:
        count = draw.randint(self._config.min_terms, self._config.max_terms)
        digits = [draw.randint(self._config.min_digits, self._config.max_digits) for _ in range(count)]
        return [draw.randint(10 ** (d - 1), 10**d - 1) for d in digits]

    def _find_allowed(self, stream: str, position: int) -> Question:
        draw = self._create_generator(stream, position)
        for _ in range(TRIES):
            asked = build_question(self._draw_terms(draw))
            if asked not in self._excluded:
                return asked
        raise ConfigError(
            f"evaluation.prompts: {len(self._held)} sums are held out, and no other sum is left to train on; "
            "lower evaluation.prompts, or raise prompts.max_digits"
        )


def build_question(terms: list[int]) -> Question:
    """Build the question for the sum of `terms`.

    The answer is the worked solution, but the verifier gets only the sum.
    """
    asked = f"Add {' + '.join(map(str, terms))}."
    key = f"add {' '.join(map(str, sorted(terms)))}"
    return Question(asked, write_steps(terms), {"family": None, "answer": str(sum(terms))}, key)


def write_steps(terms: list[int]) -> str:
    """Write the worked solution of a sum: the steps for each column of digits, then the answer.

    A number may have at most as many digits as `PLACES` has elements.
    """
    columns, carried = [], 0
    for place in range(len(str(max(terms)))):
        digits = [int(str(term)[-1 - place]) for term in terms if len(str(term)) > place]
        totals = list(accumulate([carried, *digits] if carried else digits))
        added = digits if carried else digits[1:]
        pairs = [f"+{digit}={total}" for digit, total in zip(added, totals[1:], strict=True)]
        columns.append(f"{PLACES[place]} {totals[0]}{''.join(pairs)}")
        carried = totals[-1] // 10
    return f"{', '.join(columns)}, <answer>{sum(terms)}</answer>"
