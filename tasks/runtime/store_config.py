"""Defines the keys of the config section `[store]`: where a run is stored, and which objects are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from rollflow.tasks.runtime.sections import LONGEST_SECONDS, Section


class StoreConfig(Section):
    """Where runs are stored, and how long the weights and the learner's state of each policy version are kept."""

    fixed: ClassVar[Mapping[str, str]] = {
        "uri": "the run is stored in this store",
        "keep_every": "this key has already decided which versions are kept",
        "state_every": "this key has already decided which versions store the learner's state",
        "full_every": "this key has already decided which versions are stored whole",
        "keep_prompts_bytes": "this key decided at the run's start which prompt files are stored",
    }

    uri: str | None = Field(
        None,
        description="place where runs are stored: s3://bucket/prefix, or the path of a folder, relative to the "
        "recipe file; default: a folder in the run home, which is the folder named by ROLLFLOW_HOME",
    )
    keep_last: int = Field(
        5, ge=2, description="number of newest policy versions whose weights are stored; at least async_ratio + 1"
    )
    keep_every: int = Field(
        10,
        gt=0,
        description="number n: the weights of every n-th policy version are kept forever; 1: all weights are kept",
    )
    state_every: int = Field(
        1,
        gt=0,
        description="number n: the learner's state (the optimizer's moments) is stored with every n-th policy "
        "version; after a crash of the learner, the policy versions after the newest stored state are trained again",
    )
    full_every: int = Field(
        1,
        gt=0,
        description="number n: the weights of every n-th policy version are stored whole, and the other weights as the "
        "difference to the version before, if this is much smaller; 1: all weights are stored whole",
    )
    keep_prompts_bytes: int = Field(
        2**28,
        ge=0,
        description="largest size, in bytes, of a prompt file that is copied into the run's storage; of a larger "
        "prompt file only the hash is stored",
    )
    patience_seconds: float = Field(
        3600.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds that a run waits for object storage that does not answer; after this time the run fails",
    )
    shard_bytes: int = Field(
        2**28,
        gt=0,
        description="largest size of one file of stored weights, in bytes; several files are transferred in parallel",
    )
