"""Generates seeds as prompts, for environments that make their tasks from a seed and need no prompt file.

    Task 17.        -> reference {"seed": 17}

Training questions have every second seed, and held-out questions have the seeds between them.
"""

from __future__ import annotations

import random

from rollflow.tasks.prompts.base import Question
from rollflow.tasks.prompts.games.config import SEED, SeedPrompts
from rollflow.tasks.prompts.held_out import HeldOut

STARTS = 2**30  # number of possible values of the first seed, which follows from the run's seed


class SeedSource:
    """A `QuestionSource` of seeds. See the module's docstring."""

    def __init__(self, config: SeedPrompts, seed: int, count: int, excluded: HeldOut) -> None:
        self._config, self._start = config, random.Random(f"{seed}:seeds").randrange(STARTS)
        self._held = [self._ask_seed(2 * position + 1) for position in range(count)]
        for question in self._held:
            excluded.add(question)

    def training(self, position: int) -> Question:
        """Return the training question at `position`."""
        return self._ask_seed(2 * position)

    def demonstration(self, position: int) -> Question:
        """Return a question with another seed. It has no turns, because only the environment knows its task."""
        return self._ask_seed(STARTS + 2 * position)

    def held_out(self, count: int) -> list[Question]:
        """Return the first `count` held-out questions."""
        return self._held[:count]

    def _ask_seed(self, number: int) -> Question:
        seed = self._start + number
        text = self._config.question.replace(SEED, str(seed))
        return Question(text, str(seed), {**self._config.row, "seed": seed}, f"seed {seed}")
