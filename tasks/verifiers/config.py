"""The `[reward]` section: how an answer is judged. One class a kind."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollflow.tasks.sections import LONGEST_SECONDS, Imported, Section


class RewardBase(Section):
    """Verifiers, run in worker processes that are killed at their deadline."""

    answer: Literal["all", "tag"] = Field(
        "all", description="judge the whole response, or what stands in <answer></answer>"
    )
    workers: int = Field(1, gt=0, description="processes that judge, one response at a time each")
    deadline_seconds: float = Field(
        10.0, gt=0, le=LONGEST_SECONDS, description="longest time for one response; later it scores 0 with a reason"
    )


class ReasoningGymReward(RewardBase):
    kind: Literal["reasoning-gym"] = Field("reasoning-gym", description="the family's own scorer")


class ExactReward(RewardBase):
    kind: Literal["exact"] = Field("exact", description="equality with the reference answer")


class ImportReward(Imported, RewardBase):
    kind: Literal["import"] = Field("import", description="a function of your own, annotated to return a Score")


RewardConfig = Annotated[ReasoningGymReward | ExactReward | ImportReward, Field(discriminator="kind")]
