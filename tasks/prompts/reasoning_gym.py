"""Procedural prompts of one reasoning-gym family.

reasoning-gym generates item i from the seed `dataset seed + i`. The three streams of a run are far apart in that
sequence of items. If a training item is held out, the next item of the position's `STRIDE` items replaces it.

The key of an item consists of the item's answer and the words of its expression, in any order. An item without an
expression has the words of its question in the key.
"""

from __future__ import annotations

from typing import Any

import reasoning_gym

from rollflow.storage.errors import ConfigError
from rollflow.tasks.prompts.base import Question
from rollflow.tasks.prompts.config import ReasoningGymPrompts
from rollflow.tasks.prompts.held_out import HeldOut
from rollflow.tasks.prompts.keys import unordered_key

STREAM = 10_000_000_000  # most items of one stream
STRIDE = 64  # items tried for one position; if all of them are held out, the run fails
SIZE = 2**31 - 1


class ReasoningGymSource:
    """A `QuestionSource` over one reasoning-gym family."""

    def __init__(self, config: ReasoningGymPrompts, seed: int, count: int, excluded: HeldOut) -> None:
        self._family, self._excluded = config.family, excluded
        self._training = self._open(config, seed * 3 * STREAM)
        self._demonstrations = self._open(config, (seed * 3 + 1) * STREAM)
        self._evaluation = self._open(config, (seed * 3 + 2) * STREAM)
        self._held = self._choose(count)
        for question in self._held:
            excluded.add(question)

    def training(self, position: int) -> Question:
        """Return a training question, as `QuestionSource` says."""
        return self._find_allowed(self._training, position)

    def demonstration(self, position: int) -> Question:
        """Return a demonstration, as `QuestionSource` says."""
        return self._find_allowed(self._demonstrations, position)

    def held_out(self, count: int) -> list[Question]:
        """Return held-out questions, as `QuestionSource` says."""
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
        """Choose the first `count` distinct questions of the evaluation stream, or fewer if the family has no more."""
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
            f"evaluation.prompts: after {len(self._held)} held-out prompts nothing of {self._family} is left "
            "to train on; lower evaluation.prompts, or widen prompts.options"
        )

    def _build_question(self, entry: dict[str, Any]) -> Question:
        reference = {"family": self._family, "answer": entry["answer"], "metadata": entry["metadata"]}
        return Question(entry["question"], str(entry["answer"]), reference, _build_key(entry))


def _build_key(entry: dict[str, Any]) -> str:
    """Return a key that is the same for all orders of an item's words, or of a sum's numbers in any sentence.

    Some families store the solution under `expression`, so an expression counts only if the question contains it.
    """
    asked, expression = entry["question"], entry["metadata"].get("expression")
    stands_there = isinstance(expression, str) and expression.strip() and expression in asked
    return unordered_key(expression if stands_there else asked, str(entry["answer"]))
