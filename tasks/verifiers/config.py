"""The `[reward]` section: one class for each kind of verifier."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from rollflow.tasks.runtime.sections import LONGEST_SECONDS, Imported, Section, refuse


class Format(Section):
    """The form that a response must have, whatever its answer; a response without it loses some reward."""

    pattern: str = Field(
        ".*<answer>.*</answer>.*", description="regular expression for the whole response; its dot takes line ends, too"
    )
    price: float = Field(0.1, gt=0, le=1, description="taken from the reward of a response that is not of it")

    @field_validator("pattern")
    @classmethod
    def _is_one(cls, pattern: str) -> str:
        try:
            re.compile(pattern, re.DOTALL)
        except re.error as error:
            refuse("reward.format.pattern", pattern, f"it is no regular expression ({error}); mend it")
        return pattern


class RewardBase(Section):
    """The keys of all verifiers, which run in worker processes that are killed at a deadline."""

    fixed: ClassVar[Mapping[str, str]] = {
        "kind": "earlier rewards and evaluations are its",
        "answer": "earlier responses were judged by it",
        "special_tokens": "earlier responses were judged by it",
    }

    answer: Literal["all", "tag"] = Field(
        "all", description="judge the whole response, or what stands in <answer></answer>"
    )
    special_tokens: bool = Field(
        True,
        description="judge special tokens, too, e.g. answer tags; never the final stop token",
    )
    format: Format | None = None
    workers: int = Field(1, gt=0, description="processes that judge, one response at a time each")
    deadline_seconds: float = Field(
        10.0, gt=0, le=LONGEST_SECONDS, description="longest time for one response; later it scores 0 with a reason"
    )
    start_seconds: float = Field(
        120.0, gt=0, le=LONGEST_SECONDS, description="longest time for a worker to import its verifier, and load it"
    )


class ReasoningGymReward(RewardBase):
    kind: Literal["reasoning-gym"] = Field("reasoning-gym", description="the family's own scorer")


class ExactReward(RewardBase):
    kind: Literal["exact"] = Field("exact", description="equality with the reference answer")


class ImportReward(Imported, RewardBase):
    kind: Literal["import"] = Field("import", description="a function of your own, annotated to return a Score")


RewardConfig = Annotated[ReasoningGymReward | ExactReward | ImportReward, Field(discriminator="kind")]
