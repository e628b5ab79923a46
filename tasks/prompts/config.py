"""The `[[prompts]]` sections: what is asked. One class a kind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rollflow.tasks.sections import Imported, Section


class ReasoningGymPrompts(Section):
    """Procedural prompts of one reasoning-gym family."""

    kind: Literal["reasoning-gym"] = "reasoning-gym"
    family: str = "chain_sum"
    share: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="weight of this source's groups among all that are trained on"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="the family's own options, e.g. {min_digits = 2}")
    chat: bool = Field(False, description="put the question through the tokenizer's chat template")
    system: str | None = Field(None, description="system message, with chat = true")

    @property
    def domain(self) -> str:
        """What its prompts are called in counts."""
        return self.family


class JsonlPrompts(Section):
    """Your own prompts: one JSON object a line with `question` and `answer`."""

    kind: Literal["jsonl"] = "jsonl"
    path: str
    share: float = Field(1.0, gt=0, allow_inf_nan=False)
    held_out: float = Field(0.1, ge=0, lt=1, description="part of the lines kept for evaluation")
    chat: bool = False
    system: str | None = None

    @property
    def domain(self) -> str:
        """What its prompts are called in counts."""
        return Path(self.path).stem


class ImportPrompts(Imported):
    """Prompts of your own making."""

    kind: Literal["import"] = Field("import", description="a class of your own, derived from QuestionSource")
    name: str = Field("", description="what its prompts are called in counts; default: the name of the class")
    share: float = Field(1.0, gt=0, allow_inf_nan=False)
    chat: bool = False
    system: str | None = None

    @property
    def domain(self) -> str:
        """What its prompts are called in counts."""
        return self.name or self.path.partition(":")[2]


PromptConfig = Annotated[ReasoningGymPrompts | JsonlPrompts | ImportPrompts, Field(discriminator="kind")]
