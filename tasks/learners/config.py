"""The `[train]` section: what trains. One class a kind; the key `learner` says which, as `kind` does elsewhere."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rollflow.tasks.objectives.config import GrpoObjective, ObjectiveConfig
from rollflow.tasks.sections import Section


class TrainBase(Section):
    """What all learners share."""

    kind_key: ClassVar[str] = "learner"

    objective: ObjectiveConfig = GrpoObjective()
    baseline: Literal["group", "none"] = Field("group", description="what is subtracted from the reward")
    normalize: bool = Field(True, description="divide advantages by the group's standard deviation")
    negative_weight: float = Field(
        1.0, ge=0, description="weight of negative advantages; below 1 steadies stale batches"
    )
    aggregation: Literal["token-mean", "sequence-mean"] = Field(
        "token-mean", description="the mean loss of all tokens, or of all responses, each by its own mean"
    )
    learning_rate: float = Field(5e-4, gt=0, description="of AdamW, after the warm-up")
    warmup_versions: int = Field(5, ge=0, description="versions over which the learning rate rises to its value")
    schedule: Literal["constant", "linear"] = Field(
        "constant", description="linear decays to a tenth at the last version"
    )
    weight_decay: float = Field(0.0, ge=0, description="of AdamW")
    betas: tuple[float, float] = Field((0.9, 0.95), description="of AdamW: decay of the gradient's mean and square")
    max_grad_norm: float = Field(1.0, gt=0, description="a longer gradient is scaled down to this length")
    minibatches: int = Field(1, gt=0, description="optimizer steps per version; each sees its part of the groups")
    micro_tokens: int = Field(16384, gt=0, description="padded tokens in one forward and backward pass")


class TorchTrain(TrainBase):
    learner: Literal["torch"] = Field("torch", description="torch, on one device")
    threads: int = Field(1, gt=0, description="CPU threads of the learner")


# Of two kinds it is Annotated[TorchTrain | Other, Field(discriminator="learner")]; of one, pydantic refuses that.
TrainConfig = TorchTrain
