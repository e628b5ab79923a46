"""The `[reward]` section of a reward model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from rollflow.tasks.runtime.sections import LONGEST_SECONDS
from rollflow.tasks.scorers.base_config import RewardBase

_JUDGED = "earlier responses were judged by it"


class ModelReward(RewardBase):
    fixed: ClassVar[Mapping[str, str]] = {
        **RewardBase.fixed,
        "path": "the run's start recorded the hashes of this model's files",
        **dict.fromkeys(("label", "scale", "offset", "dtype", "max_tokens", "cut"), _JUDGED),
    }

    kind: Literal["model"] = Field(
        "model", description="a reward model: your own sequence-classification model in the Hugging Face format"
    )
    path: str = Field(
        min_length=1,
        description="a folder with a Hugging Face sequence-classification model and its tokenizer, relative to the "
        "recipe, or the name of a model on the Hugging Face hub",
    )
    label: str | None = Field(
        None,
        description="name of the model's label whose probability is the score; default: the logit of the model's only "
        "label is the score",
    )
    scale: float = Field(
        1.0, ge=-1e6, le=1e6, description="factor by which the logit or probability is multiplied to get the reward"
    )
    offset: float = Field(
        0.0, ge=-1e6, le=1e6, description="number that is added to the scaled logit or probability to get the reward"
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="data type of the weights of the reward model")
    max_tokens: int | None = Field(
        None,
        gt=0,
        description="largest number of tokens of a prompt and its response that the reward model reads; default: the "
        "context length of the model",
    )
    cut: Literal["start", "end"] = Field(
        "start",
        description="which end of a text that is too long is cut off. start: the reward model reads the end of the "
        "response; end: it reads the prompt and the beginning of the response",
    )
    max_batch: int = Field(
        32, gt=0, le=4096, description="largest number of responses in one batch of the reward model"
    )
    batch_tokens: int = Field(
        16384,
        gt=0,
        description="largest number of tokens in one batch of the reward model, including padding; a longer response "
        "is a batch of its own",
    )
    workers: int = Field(
        1, gt=0, description="number of Ray actors with a copy of the reward model; a copy may run on any node"
    )
    cpus: int = Field(1, gt=0, description="number of CPU threads of each copy of the reward model")
    gpus: float = Field(
        0.0,
        ge=0,
        le=1,
        description="number of GPUs that each copy of the reward model reserves; a number below 1 shares a GPU; 0: the "
        "model runs on CPUs",
    )
    deadline_seconds: float = Field(
        300.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds that a response waits while no copy of the reward model returns any score; then the try "
        "to score the response has failed",
    )
    judge_tries: int = Field(
        3,
        ge=1,
        le=100,
        description="number of tries to score a response while the reward model is away; after the last try, the key "
        "unjudged decides what happens",
    )

    @property
    def worker_processes(self) -> int:
        """Number of worker processes in the reward actor: 0, because a reward model has Ray actors of its own."""
        return 0
