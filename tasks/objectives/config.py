"""The `[train.objective]` section: what is minimised. One class a kind."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollflow.tasks.sections import Imported, Section


class GrpoObjective(Section):
    """PPO clipping of pi/mu on the recorded behaviour log-probs, with group advantages."""

    kind: Literal["grpo"] = Field("grpo", description="PPO clipping on recorded log-probs")
    clip_low: float = Field(0.2, gt=0, lt=1, description="the ratio is held at 1 - clip_low")
    clip_high: float = Field(0.28, gt=0, description="the ratio is held at 1 + clip_high")
    dual_clip: float | None = Field(None, gt=1, description="largest ratio a negative advantage counts with")


class DecoupledPpoObjective(Section):
    """Decoupled PPO: clip pi/pi_p, weight by sg(pi_p/mu) capped at `weight_cap`."""

    kind: Literal["decoupled-ppo"] = Field("decoupled-ppo", description="PPO clipping around a proximal policy")
    clip_low: float = Field(0.2, gt=0, lt=1, description="the ratio is held at 1 - clip_low")
    clip_high: float = Field(0.28, gt=0, description="the ratio is held at 1 + clip_high")
    weight_cap: float = Field(5.0, gt=0, description="largest weight pi_p/mu of a token")


class ImportObjective(Imported):
    """An objective of your own."""

    kind: Literal["import"] = Field("import", description="a class of your own, derived from Objective")


ObjectiveConfig = Annotated[GrpoObjective | DecoupledPpoObjective | ImportObjective, Field(discriminator="kind")]
