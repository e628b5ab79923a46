"""Prompts of your own: a class that derives from `QuestionSource`, made with `seed`, `held_out` and its options.

What the other sources guarantee by how they are made is looked at here, question by question.
"""

from __future__ import annotations

import json
from typing import Any

from rollflow.storage.errors import ConfigError
from rollflow.tasks.imports import imported_class, made
from rollflow.tasks.prompts.base import Question, QuestionSource
from rollflow.tasks.prompts.config import ImportPrompts

KEY = "prompts"


class ImportedSource:
    """`QuestionSource` over the one that `prompts.path` names."""

    def __init__(self, config: ImportPrompts, seed: int, held_out: int) -> None:
        """ConfigError: there is no such class, or it takes other options."""
        # Its arguments are its own: the contract says what an instance does.
        own: Any = imported_class(KEY, config, QuestionSource)
        self._config = config
        self._own: QuestionSource = made(KEY, config, lambda: own(seed=seed, held_out=held_out, **config.options))
        self._held = {question.text for question in self.held_out(held_out)}

    def training(self, position: int) -> Question:
        """See `QuestionSource`."""
        return self._outside(f"training({position})", made(KEY, self._config, lambda: self._own.training(position)))

    def demonstration(self, position: int) -> Question:
        """See `QuestionSource`."""
        found = made(KEY, self._config, lambda: self._own.demonstration(position))
        return self._outside(f"demonstration({position})", found)

    def held_out(self, count: int) -> list[Question]:
        """See `QuestionSource`."""
        found = list(made(KEY, self._config, lambda: self._own.held_out(count)))[:count]
        for question in found:
            self._check(f"held_out({count})", question)
        if len({question.text for question in found}) < len(found):
            raise self._refused(f"held_out({count})", "asks a question twice; hold out distinct ones")
        return found

    def _outside(self, call: str, question: Question) -> Question:
        self._check(call, question)
        if question.text in self._held:
            raise self._refused(call, "asks a question that is held out; leave those out of what is trained on")
        return question

    def _check(self, call: str, question: object) -> None:
        if not isinstance(question, Question):
            raise self._refused(call, f"gave a {type(question).__name__}; give rollflow's Question")
        try:
            json.dumps(dict(question.reference))
        except (TypeError, ValueError) as error:
            raise self._refused(
                call, f"has a reference that is no JSON ({error}); it goes to another process"
            ) from None

    def _refused(self, call: str, why: str) -> ConfigError:
        return ConfigError(f"{KEY}.path = {self._config.path!r}: {call} {why}")
