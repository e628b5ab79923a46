"""The `[reward]` section: how an answer is judged."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollflow.tasks.sections import Section


class RewardConfig(Section):
    """Verifiers, run in worker processes that are killed at their deadline."""

    kind: Literal["reasoning-gym", "exact"] = Field(
        "reasoning-gym", description="the family's own scorer, or equality with the reference answer"
    )
    answer: Literal["all", "tag"] = Field(
        "all", description="judge the whole response, or what stands in <answer></answer>"
    )
    workers: int = Field(1, gt=0)
    deadline_seconds: float = Field(
        10.0, gt=0, description="longest time for one response; later it scores 0 with a reason"
    )
