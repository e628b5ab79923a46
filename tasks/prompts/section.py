"""Defines the config keys that all `[[prompts]]` sections have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rollflow.tasks.runtime.sections import Section, refuse

PLACE = "{question}"  # the placeholder in a prompt template that the question replaces


class PromptBase(Section):
    """The config keys of all prompt sources."""

    share: float = Field(
        1.0,
        gt=0,
        allow_inf_nan=False,
        description="relative weight of this prompt source: its share of the trained prompts is its weight divided by "
        "the sum of all weights",
    )
    chat: bool = Field(False, description="whether the tokenizer's chat template is applied to each question")
    template: str | None = Field(
        None,
        description='prompt template: a text in which each question replaces the placeholder "{question}"; if a '
        "question is a list of messages, the template is applied to the last message; default: the question alone",
    )
    system: str | None = Field(
        None, description="system message that the chat template puts before a question; this key requires chat = true"
    )
    too_long: Literal["refuse", "drop"] = Field(
        "refuse",
        description="what happens to a prompt that leaves no room for a response of engine.max_new_tokens in the "
        "model's context. refuse: the run is refused before it starts; drop: the prompt is left out",
    )
    reward: str | None = Field(
        None,
        description="name of the scorer of this prompt source, from [rewards.NAME]; default: the scorer of [reward]",
    )

    @property
    def is_slow(self) -> bool:
        """True if finding a prompt may take long, so that the scheduler must not wait in its event loop."""
        return False

    def scorer_of(self, reference: Mapping[str, Any]) -> str:
        """Return the name of the scorer of a question with this reference; "" means the scorer of `[reward]`."""
        return self.reward or ""

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        if self.template is not None and PLACE not in self.template:
            refuse(
                "prompts.template", self.template, f"the template has no place for the question; write {PLACE} in it"
            )
        return self
