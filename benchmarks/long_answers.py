"""Defines questions whose correct answers have long-tailed lengths: the policy counts down from one number to another.

    Count 457 to 454.
    457 456 455 454

The length of the right answer is drawn from a lognormal distribution, and is at most `cap` times the median, so a few
answers are much longer than the others. An answer of n numbers has 4 n tokens, with its end token. Training questions
never contain a number from which a held-out question starts.
"""

from __future__ import annotations

import math
import random

from rollflow.tasks.prompts.base import Question, QuestionSource

FIRST, LAST = 100, 999  # all numbers have three digits
TOKENS = 4  # tokens of a number with the space or the end token behind it
SPLIT = 10  # one start number in ten is held out


class CountdownSource(QuestionSource):
    """A source of questions that count down. A question depends only on the seed, its stream and its position."""

    def __init__(self, seed: int, held_out: int, median: float = 16.0, sigma: float = 1.0, cap: float = 20.0) -> None:
        """Create the source. `median` is a number of tokens; `cap` is a multiple of the median."""
        self._seed, self._median, self._sigma, self._cap = seed, median, sigma, cap
        self._held = self._draw_held_out(held_out)

    def training(self, position: int) -> Question:
        """Return the training question at `position`."""
        return self._draw("training", position, held=False)

    def demonstration(self, position: int) -> Question:
        """Return the question to demonstrate at `position`."""
        return self._draw("demonstration", position, held=False)

    def held_out(self, count: int) -> list[Question]:
        """Return the first `count` held-out questions."""
        return self._held[:count] if count <= len(self._held) else self._draw_held_out(count)

    def draw_numbers(self, draw: random.Random) -> int:
        """Draw how many numbers the right answer has."""
        tokens = self._median * math.exp(self._sigma * draw.gauss(0.0, 1.0))
        return max(1, round(min(tokens, self._cap * self._median) / TOKENS))

    def _draw(self, stream: str, position: int, *, held: bool) -> Question:
        draw = random.Random(f"{self._seed}:{stream}:{position}")
        numbers = self.draw_numbers(draw)
        starts = [n for n in range(FIRST + numbers - 1, LAST + 1) if (n % SPLIT == self._seed % SPLIT) == held]
        return build_question(draw.choice(starts), numbers)

    def _draw_held_out(self, count: int) -> list[Question]:
        found: dict[str, Question] = {}
        position = 0
        while len(found) < count:
            question = self._draw("held out", position, held=True)
            found.setdefault(question.text, question)
            position += 1
        return list(found.values())


def build_question(start: int, numbers: int) -> Question:
    """Build the question that counts down from `start` over so many numbers."""
    end = start - numbers + 1
    answer = " ".join(map(str, range(start, end - 1, -1)))
    return Question(f"Count {start} to {end}.", answer, {"answer": answer})
