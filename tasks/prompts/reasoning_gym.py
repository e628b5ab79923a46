"""Generates questions with one family (data set) of the library reasoning-gym.

The training, demonstration and evaluation streams have seeds that are far apart, so they never overlap. A position of a
stream stands for `STRIDE` items of reasoning-gym, of which the first one that is not held out is used.

The key of an item consists of its answer and the sorted words of its expression, or of its question if it has no
expression.
"""

from __future__ import annotations

from typing import Any

import reasoning_gym

from rollflow.storage.errors import ConfigError
from rollflow.tasks.prompts.base import Question
from rollflow.tasks.prompts.config import ReasoningGymPrompts
from rollflow.tasks.prompts.held_out import HeldOut
from rollflow.tasks.prompts.keys import unordered_key

STREAM = 10_000_000_000  # largest number of items in a stream
STRIDE = 64  # largest number of items to try for a position; if all of them are held out, the run fails
SIZE = 2**31 - 1


class ReasoningGymSource:
    """A `QuestionSource` that generates questions with one reasoning-gym family."""

    def __init__(self, config: ReasoningGymPrompts, seed: int, count: int, excluded: HeldOut) -> None:
        self._family, self._excluded = config.family, excluded
        self._training = self._open(config, seed * 3 * STREAM)
        self._demonstrations = self._open(config, (seed * 3 + 1) * STREAM)
        self._evaluation = self._open(config, (seed * 3 + 2) * STREAM)
        self._held = self._choose(count)
        for question in self._held:
            excluded.add(question)

    def training(self, position: int) -> Question:
        """Return the training question at `position`."""
        return self._find_allowed(self._training, position)

    def demonstration(self, position: int) -> Question:
        """Return the question to demonstrate at `position`."""
        return self._find_allowed(self._demonstrations, position)

    def held_out(self, count: int) -> list[Question]:
        """Return the first `count` held-out questions."""
        return self._held[:count]

    def _open(self, config: ReasoningGymPrompts, seed: int) -> Any:
        try:
            return reasoning_gym.create_dataset(config.family, seed=seed, size=SIZE, **config.options)
        except ValueError as error:
            raise ConfigError(
                f"prompts.family = {config.family!r}: {error}; see reasoning-gym's list of data sets"
            ) from None
        except (TypeError, AssertionError) as error:
            cure = f"give options that {config.family} accepts"
            raise ConfigError(f"prompts.options = {config.options!r}: {error}; {cure}") from None

    def _choose(self, count: int) -> list[Question]:
        """Return the first `count` distinct questions of the evaluation stream, or fewer if its first 20 * `count`
        items have fewer distinct questions.
        """
        chosen: list[Question] = []
        held = HeldOut(self._excluded.split)
        for item in range(count * 20):
            if len(chosen) == count:
                break
            question = self._build_question(self._evaluation[item])
            if question not in held:
                held.add(question)
                chosen.append(question)
        return chosen

    def _find_allowed(self, dataset: Any, position: int) -> Question:
        for item in range(position * STRIDE, (position + 1) * STRIDE):
            question = self._build_question(dataset[item])
            if question not in self._excluded:
                return question
        raise ConfigError(
            f"evaluation.prompts: {len(self._held)} prompts are held out, and no other prompt of {self._family} "
            "is left to train on; lower evaluation.prompts, or widen prompts.options"
        )

    def _build_question(self, entry: dict[str, Any]) -> Question:
        reference = {"family": self._family, "answer": entry["answer"], "metadata": entry["metadata"]}
        return Question(entry["question"], str(entry["answer"]), reference, _build_key(entry))


def _build_key(entry: dict[str, Any]) -> str:
    """Return the key of a reasoning-gym item, which ignores the order of words and the sentence around the
    expression.

    An `expression` that is not part of the question is ignored, because some families store the solution there.
    """
    asked, expression = entry["question"], entry["metadata"].get("expression")
    stands_there = isinstance(expression, str) and expression.strip() and expression in asked
    return unordered_key(expression if stands_there else asked, str(entry["answer"]))
