"""The `[policy]` section: the source of the policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollflow.tasks.runtime.sections import Section


class ColdStart(Section):
    """Build a small Llama policy and supervise it on demonstrations until it reaches a low accuracy."""

    hidden_size: int = Field(128, gt=0, description="width; a multiple of heads")
    layers: int = Field(2, gt=0, description="transformer blocks")
    heads: int = Field(4, gt=0, description="attention heads in a layer")
    context: int = Field(256, gt=0, description="longest prompt plus response, in tokens")
    vocabulary: int = Field(320, ge=260, description="size of the byte-level BPE vocabulary")
    learning_rate: float = Field(2e-3, gt=0, description="of the supervised steps, after a warm-up")
    batch: int = Field(48, gt=0, description="demonstrations per supervised step")
    target_accuracy: float = Field(0.3, gt=0, lt=1, description="held-out accuracy at which the cold start ends")
    max_steps: int = Field(2000, gt=0, description="supervised steps before the run fails: the target is too far")
    evaluate_every: int = Field(10, gt=0, description="supervised steps between two looks at the accuracy")


class PolicyConfig(Section):
    """The source of the policy: a Hugging Face folder (or hub name), or a cold start."""

    path: str | None = Field(None, description="a Hugging Face folder, relative to the recipe, or a hub name")
    cold_start: ColdStart | None = None
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="type of the weights, trained and served")
