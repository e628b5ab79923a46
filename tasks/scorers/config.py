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
        ".*<answer>.*</answer>.*",
        description="regular expression that the whole response has to match; its dot matches line ends, too",
    )
    penalty: float = Field(
        0.1, gt=0, le=1, description="amount subtracted from the reward of a response that does not match"
    )

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
        "all", description="text that is scored: the whole response, or what stands in <answer></answer>"
    )
    special_tokens: bool = Field(
        True,
        description="score special tokens, too, e.g. answer tags; the final stop token is never scored",
    )
    format: Format | None = None
    workers: int = Field(1, gt=0, description="worker processes; each scores one response at a time")
    deadline_seconds: float = Field(
        10.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds allowed for one response; after that its reward is 0, with a reason",
    )
    start_seconds: float = Field(
        120.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds allowed for a worker to start, which includes loading its verifier",
    )


class ReasoningGymReward(RewardBase):
    kind: Literal["reasoning-gym"] = Field("reasoning-gym", description="the scorer of the reasoning-gym family")


class ExactReward(RewardBase):
    kind: Literal["exact"] = Field("exact", description="equality with the reference answer")


class ImportReward(Imported, RewardBase):
    kind: Literal["import"] = Field("import", description="your own function, annotated to return a Score")
    at_once: int = Field(
        32,
        gt=0,
        le=4096,
        description="most responses that a worker scores at a time, if the function is asynchronous or takes several",
    )


RewardConfig = Annotated[ReasoningGymReward | ExactReward | ImportReward, Field(discriminator="kind")]
