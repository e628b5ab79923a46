"""Imports a user-defined question source, and checks each question that it returns."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import partial

from rollflow.storage.errors import ConfigError
from rollflow.tasks.prompts.base import Question, QuestionSource
from rollflow.tasks.prompts.config import ImportPrompts
from rollflow.tasks.prompts.held_out import HeldOut
from rollflow.tasks.prompts.messages import find_messages_fault
from rollflow.tasks.runtime.imports import build_part, imported_object

KEY = "prompts"
TRIES = 64  # largest number of positions to try until a question is not held out; if all are held out, the run fails
STEP = 1_000_003  # distance between two positions that are tried one after the other


class ImportedSource:
    """Wraps the user-defined `QuestionSource` that `prompts.path` names."""

    def __init__(self, config: ImportPrompts, seed: int, count: int, excluded: HeldOut) -> None:
        """Create the question source; raise `ConfigError` if the user's class does not exist or rejects the options."""
        self._config, self._excluded = config, excluded
        contract: type[QuestionSource] = QuestionSource  # type: ignore[type-abstract]
        self._own = imported_object(KEY, config, contract, seed=seed, held_out=count)
        self._held = {question.text: question for question in self.held_out(count)}
        for question in self._held.values():
            excluded.add(question)

    def training(self, position: int) -> Question:
        """Return the training question at `position`."""
        return self._find_allowed("training", self._own.training, position)

    def demonstration(self, position: int) -> Question:
        """Return the question to demonstrate at `position`."""
        return self._find_allowed("demonstration", self._own.demonstration, position)

    def held_out(self, count: int) -> list[Question]:
        """Return the first `count` held-out questions."""
        found = build_part(KEY, self._config, lambda: list(itertools.islice(self._own.held_out(count), count)))
        for question in found:
            self._check(f"held_out({count})", question)
        if len({self._excluded.identity(question) for question in found}) < len(found):
            why = "asks a question twice; hold out distinct ones"
            raise self._refusal(call=f"held_out({count})", why=why)
        return found

    def _find_allowed(self, stream: str, ask: Callable[[int], Question], position: int) -> Question:
        """Return the question at `position`; if it is held out, return the question at a later position."""
        for place in range(position, position + TRIES * STEP, STEP):
            call, question = f"{stream}({place})", build_part(KEY, self._config, partial(ask, place))
            self._check(call, question)
            if question.text in self._held:
                why = f"asks the text of a held-out question, {question.text!r}; train on no question with this text"
                raise self._refusal(call, why)
            if question not in self._excluded:
                return question
        why = "asks what is held out; leave that out of what is trained on"
        raise self._refusal(call=f"{stream}({position})", why=why)

    def _check(self, call: str, question: object) -> None:
        if not isinstance(question, Question):
            raise self._refusal(call, f"gave a {type(question).__name__}; return rollflow's Question")
        for name, text in (("text", question.text), ("answer", question.answer), ("key", question.key)):
            if not isinstance(text, str) or not _is_utf8(text):
                raise self._refusal(
                    call, f"gave a question whose {name} is {text!r}; give a str that can be encoded in UTF-8"
                )
        if question.messages and (wrong := self._find_messages_fault(question)):
            raise self._refusal(call, wrong)
        if not question.text.strip():
            raise self._refusal(call, "gave a question without text; give a text that is not empty")
        try:
            json.dumps(dict(question.reference))
        except (TypeError, ValueError) as error:
            raise self._refusal(
                call,
                f"gave a question whose reference is not JSON ({error}); give JSON, because other processes read "
                "the reference",
            ) from None

    def _find_messages_fault(self, question: Question) -> str | None:
        if not self._config.chat:
            return "has messages, which the chat template writes; set prompts.chat = true"
        wrong = find_messages_fault(question.messages)
        return wrong and f"has wrong messages: {wrong}"

    def _refusal(self, call: str, why: str) -> ConfigError:
        return ConfigError(f"{KEY}.path = {self._config.path!r}: {call} {why}")


def _is_utf8(text: str) -> bool:
    """Return whether a text can be encoded in UTF-8, which lone surrogates cannot."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)
