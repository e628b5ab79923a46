"""The `[policy]` section of a run's TOML file, which names the policy to train: an existing model or a cold start."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollflow.tasks.runtime.sections import Section


class ColdStart(Section):
    """A small new Llama policy, which is trained on demonstrations until it reaches a low accuracy."""

    hidden_size: int = Field(128, gt=0, description="width of the model; it must be a multiple of heads")
    layers: int = Field(2, gt=0, description="number of transformer blocks")
    heads: int = Field(4, gt=0, description="number of attention heads in each layer")
    context: int = Field(256, gt=0, description="largest number of tokens of a prompt and its response together")
    vocabulary: int = Field(320, ge=260, description="number of tokens of the byte-level BPE tokenizer")
    learning_rate: float = Field(2e-3, gt=0, description="learning rate of the supervised training, after its warm-up")
    batch: int = Field(48, gt=0, description="number of demonstrations in each supervised step")
    target_accuracy: float = Field(
        0.3,
        gt=0,
        lt=1,
        description="held-out accuracy at which the supervised training ends; of several domains, the mean counts, and "
        "domains that are further below this accuracy get more demonstrations",
    )
    max_steps: int = Field(
        2000,
        gt=0,
        description="number of supervised steps after which the run fails if the policy has not reached "
        "target_accuracy",
    )
    evaluate_every: int = Field(
        10, gt=0, description="number of supervised steps between two measurements of the held-out accuracy"
    )


class PolicyConfig(Section):
    """The source of the policy: a Hugging Face folder (or hub name), or a cold start."""

    path: str | None = Field(
        None,
        description="a folder with a Hugging Face model, relative to the recipe, or the name of a model on the "
        "Hugging Face hub",
    )
    cold_start: ColdStart | None = None
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="data type of the policy's weights, in training and in the engines"
    )
