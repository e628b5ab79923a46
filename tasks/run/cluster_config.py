"""Defines the `[cluster]` section of a run's config: the Ray cluster, and the nodes and environment of its Ray
actors.

Secrets are rejected in the section `[cluster]`, because the config of a run is stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rollflow.tasks.runtime.sections import LONGEST_SECONDS, SECRET_NAME, Section, refusal, refuse


class RolePlacement(Section):
    """The nodes on which the Ray actors of one role (engine, learner, scheduler or reward) may run."""

    labels: dict[str, str] = Field(
        default_factory=dict,
        description='Ray labels that a node must have to run the actors of this role, e.g. {"ray.io/market-type" = '
        '"spot"}; empty: any node',
    )
    resource: str | None = Field(
        None,
        min_length=1,
        description="custom Ray resource that a node must have to run the actors of this role; each actor reserves "
        "0.001 of the resource; default: any node",
    )


class PlacementConfig(Section):
    """The placement of a run's Ray actors on the nodes of the cluster, and whether the actors reserve CPUs."""

    strategy: Literal["spread", "pack"] = Field(
        "spread",
        description="how engines and further reward actors are placed on the nodes of the Ray cluster. spread: on all "
        "nodes in turn; pack: by Ray's default rule, which fills one node to half before the next node",
    )
    reserve_cpus: bool = Field(
        False,
        description="whether Ray reserves CPUs for the threads of the run's Ray actors; false: other programs on "
        "the Ray cluster may use these CPUs",
    )
    engine: RolePlacement = RolePlacement()
    learner: RolePlacement = RolePlacement()
    scheduler: RolePlacement = RolePlacement()
    reward: RolePlacement = RolePlacement()


class RewardActorsConfig(Section):
    """The smallest and the largest number of reward actors. The run starts more reward actors, up to the largest
    number, while many responses wait for a score.
    """

    min: int = Field(1, gt=0, le=1024, description="smallest number of reward actors")
    max: int | None = Field(
        None,
        gt=0,
        le=1024,
        description="largest number of reward actors, which run on different nodes if possible. Each reward actor has "
        "all worker processes of [reward] and [rewards]. Default: the value of min",
    )
    grow_seconds: float = Field(
        10.0,
        ge=0,
        le=3600,
        description="another reward actor starts after responses have waited for a free worker for this number of "
        "seconds",
    )
    idle_seconds: float = Field(
        60.0,
        ge=0,
        le=3600,
        description="a reward actor ends after it was not needed for this number of seconds",
    )

    @property
    def most(self) -> int:
        """The largest number of reward actors."""
        return self.min if self.max is None else self.max

    def find_idle(self, workers: int) -> Iterator[PydanticCustomError]:
        """Reject several reward actors if the scorers of the run have no worker processes."""
        if self.most > 1 and not workers:
            key = "min" if self.max is None else "max"
            cure = "no scorer of this run has worker processes, so further reward actors have no work; remove the key"
            yield refusal(f"cluster.reward_actors.{key}", self.most, cure)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.most < self.min:
            refuse(
                "cluster.reward_actors.max", self.max, f"max is smaller than min = {self.min}; raise max or lower min"
            )
        return self


VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ClusterConfig(Section):
    """The Ray cluster on which the run's actors run."""

    address: str = Field(
        "auto",
        description="address of the head of a Ray cluster, as host:port; auto: a private Ray cluster is started on "
        "this machine",
    )
    lease_seconds: float = Field(
        600.0,
        ge=0,
        le=LONGEST_SECONDS,
        description="the run's Ray actors end and free their GPUs after this number of seconds without a supervisor "
        "(the process that controls the run); 0: the actors never end by themselves",
    )
    placement: PlacementConfig = PlacementConfig()
    reward_actors: RewardActorsConfig = RewardActorsConfig()
    env: dict[str, str] = Field(
        default_factory=dict,
        description='environment variables of the run\'s Ray actors, e.g. {NCCL_SOCKET_IFNAME = "eth0"}',
    )
    runtime_env: dict[str, Any] = Field(
        default_factory=dict,
        description="runtime_env of Ray for the run's Ray actors; its key env_vars is rejected, because the key "
        "cluster.env sets environment variables",
    )

    @model_validator(mode="after")
    def _usable_environment(self) -> Self:
        for name, value in self.env.items():
            if not VARIABLE.fullmatch(name):
                refuse(
                    f"cluster.env.{name}",
                    "...",
                    "this is not a valid name of an environment variable; correct the name",
                )
            if "\0" in value:
                refuse(
                    f"cluster.env.{name}",
                    value,
                    "an environment variable cannot hold a NUL character; remove the character",
                )
            if SECRET_NAME.search(name):
                refuse(
                    f"cluster.env.{name}",
                    "...",
                    "a run stores its config, so this secret would be stored; set the variable on the nodes themselves",
                )
        if "env_vars" in self.runtime_env:
            refuse("cluster.runtime_env.env_vars", "...", "set the actors' environment variables in cluster.env")
        if any(map(has_password, _list_texts(self.runtime_env))):
            cure = (
                "an address in runtime_env contains a password, and a run stores its config; set the secret on "
                "the nodes themselves"
            )
            refuse("cluster.runtime_env", "...", cure)
        return self


def _list_texts(tree: object) -> Iterator[str]:
    """Yield every string in a tree."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping):
        yield from (text for value in tree.values() for text in _list_texts(value))
    elif isinstance(tree, Sequence):
        yield from (text for value in tree for text in _list_texts(value))


def has_password(text: str) -> bool:
    """Return whether a text contains a URL with a password."""
    return bool(re.search(r"://[^/@\s]*:[^/@\s]+@", text))
