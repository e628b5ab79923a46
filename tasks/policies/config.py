"""Defines the config section `[policy]`, which names the policy to train: an existing model, a policy version of an
earlier run, or a cold start.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollflow.tasks.runtime.sections import Section


class ColdStart(Section):
    """A small new Llama policy, which is trained on demonstrations before the run, until it reaches a target
    accuracy.
    """

    hidden_size: int = Field(
        128, gt=0, description="width of the new model's hidden states; the width must be a multiple of heads"
    )
    layers: int = Field(2, gt=0, description="number of transformer blocks of the new model")
    heads: int = Field(4, gt=0, description="number of attention heads in each layer of the new model")
    context: int = Field(256, gt=0, description="largest number of tokens of a prompt and its response together")
    vocabulary: int = Field(
        320,
        ge=258,
        description="number of tokens in the vocabulary of the byte-level BPE tokenizer; with 258, each byte is a "
        "token",
    )
    chat_template: str | None = Field(
        None,
        min_length=1,
        description="chat template (Jinja) of the new model, for prompts with chat = true; it writes the end token "
        "<|end|> after each answer; default: no chat template",
    )
    learning_rate: float = Field(2e-3, gt=0, description="learning rate of the supervised training after its warm-up")
    batch: int = Field(48, gt=0, description="number of demonstrations in each step of the supervised training")
    target_accuracy: float = Field(
        0.3,
        gt=0,
        lt=1,
        description="accuracy on held-out questions at which the supervised training ends; with several prompt "
        "sources, the mean of their accuracies counts, and sources that are further below the target get more "
        "demonstrations",
    )
    max_steps: int = Field(
        2000,
        gt=0,
        description="largest number of steps of the supervised training; if the policy has not reached "
        "target_accuracy by then, the run fails",
    )
    evaluate_every: int = Field(
        10,
        gt=0,
        description="number of supervised training steps between two measurements of the accuracy on held-out "
        "questions",
    )


class EarlierRun(Section):
    """A policy version of an earlier run, whose weights and tokenizer the new run copies once, at its start."""

    run: str = Field(
        min_length=1,
        description="run id of the earlier run in the store of the new run, or the path or URI of any run",
    )
    version: int | None = Field(
        None,
        ge=0,
        description="policy version of the earlier run; default: the newest version at the start of the new run",
    )


class PolicyConfig(Section):
    """The policy to train: a Hugging Face model (folder or name on the hub), a policy version of an earlier run, or a
    new small model (a cold start)."""

    path: str | None = Field(
        None,
        description="path of a folder with a Hugging Face model, relative to the recipe file, or the name of a "
        "model on the Hugging Face hub",
    )
    from_run: EarlierRun | None = None
    cold_start: ColdStart | None = None
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="data type of the policy's weights, both in the learner and in the engines"
    )
