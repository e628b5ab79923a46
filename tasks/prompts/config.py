"""The `[[prompts]]` sections: one class for each kind of question source."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rollflow.tasks.runtime.sections import Imported, Section, refuse


class PromptBase(Section):
    """The keys of all sources."""

    share: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="weight of this source's groups among all that are trained on"
    )
    chat: bool = Field(False, description="put the question through the tokenizer's chat template")
    system: str | None = Field(None, description="system message, with chat = true")
    too_long: Literal["refuse", "drop"] = Field(
        "refuse", description="treatment of prompts that leave no room for engine.max_new_tokens in the context"
    )


class ReasoningGymPrompts(PromptBase):
    """Procedural prompts of one reasoning-gym family."""

    kind: Literal["reasoning-gym"] = Field("reasoning-gym", description="questions that reasoning-gym makes")
    family: str = Field("chain_sum", description="the data set's name in reasoning-gym")
    options: dict[str, Any] = Field(default_factory=dict, description="the family's own options, e.g. {min_digits = 2}")

    @property
    def domain(self) -> str:
        """Name of its prompts in statistics."""
        return self.family


class JsonlPrompts(PromptBase):
    """User-defined prompts in a file: one JSON object per line, with `question` and `answer`."""

    kind: Literal["jsonl"] = Field("jsonl", description="a file of your own")
    path: str = Field(description="the file, one JSON object a line; a relative path is relative to the recipe")
    held_out: float = Field(0.1, ge=0, lt=1, description="part of the lines kept for evaluation")
    answer_after: str | None = Field(
        None,
        min_length=1,
        description='mark before the answer in a worked solution, e.g. "####"',
    )

    @property
    def domain(self) -> str:
        """Name of its prompts in statistics."""
        return Path(self.path).stem


class ColumnSumsPrompts(PromptBase):
    """Sums of several numbers, demonstrated column by column. The verifier is `exact`, with `answer = "tag"`."""

    kind: Literal["column-sums"] = Field("column-sums", description="sums, with demonstrations that write their steps")
    min_terms: int = Field(2, ge=2, description="fewest numbers in a sum")
    max_terms: int = Field(3, le=10, description="most numbers in a sum")
    min_digits: int = Field(2, ge=1, description="fewest digits of a number")
    max_digits: int = Field(4, le=6, description="most digits of a number")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for name in ("terms", "digits"):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if least > most:
                refuse(f"prompts.min_{name}", least, f"it must not be above max_{name} = {most}; choose a smaller one")
        return self

    @property
    def domain(self) -> str:
        """Name of its prompts in statistics."""
        return self.kind


class SortingPrompts(PromptBase):
    """Digits to sort, as one word. The verifier is `exact`."""

    kind: Literal["sorting"] = Field("sorting", description="digits to sort")
    digits: int = Field(5, ge=2, le=8, description="number of digits in a question")
    held_out: float = Field(0.2, gt=0, lt=1, description="share of the multisets of digits that is kept for evaluation")

    @property
    def domain(self) -> str:
        """Name of its prompts in statistics."""
        return self.kind


class ImportPrompts(Imported, PromptBase):
    """Prompts from a user-defined class."""

    kind: Literal["import"] = Field("import", description="a class of your own, derived from QuestionSource")
    name: str = Field("", description="what its prompts are called in counts; default: the name of the class")

    @property
    def domain(self) -> str:
        """Name of its prompts in statistics."""
        return self.name or self.path.partition(":")[2]


PromptConfig = Annotated[
    ReasoningGymPrompts | JsonlPrompts | ColumnSumsPrompts | SortingPrompts | ImportPrompts, Field(discriminator="kind")
]
