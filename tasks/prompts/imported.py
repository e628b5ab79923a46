"""Prompts of your own: a class that derives from `QuestionSource`, made with `seed`, `held_out` and its options.

What the other sources guarantee by how they are made is looked at here, question by question.
"""

from __future__ import annotations

import itertools
import json

from rollflow.storage.errors import ConfigError
from rollflow.tasks.imports import imported_object, made
from rollflow.tasks.prompts.base import Question, QuestionSource
from rollflow.tasks.prompts.config import ImportPrompts

KEY = "prompts"


class ImportedSource:
    """`QuestionSource` over the one that `prompts.path` names."""

    def __init__(self, config: ImportPrompts, seed: int, held_out: int) -> None:
        """ConfigError: there is no such class, or it takes other options."""
        self._config = config
        contract: type[QuestionSource] = QuestionSource  # type: ignore[type-abstract]
        self._own = imported_object(KEY, config, contract, seed=seed, held_out=held_out)
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
        found = made(KEY, self._config, lambda: list(itertools.islice(self._own.held_out(count), count)))
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
        for name, text in (("text", question.text), ("answer", question.answer)):
            if not isinstance(text, str) or not _is_utf8(text):
                raise self._refused(call, f"has the {name} {text!r}; give a str that UTF-8 can say")
        if not question.text.strip():
            raise self._refused(call, "asks nothing; give a text that is not empty")
        try:
            json.dumps(dict(question.reference))
        except (TypeError, ValueError) as error:
            raise self._refused(
                call, f"has a reference that is no JSON ({error}); it goes to another process"
            ) from None

    def _refused(self, call: str, why: str) -> ConfigError:
        return ConfigError(f"{KEY}.path = {self._config.path!r}: {call} {why}")


def _is_utf8(text: str) -> bool:
    """Whether it can be stored: half of a surrogate pair cannot."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)
