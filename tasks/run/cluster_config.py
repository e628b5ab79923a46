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
    """The nodes on which the Ray actors of one role (engine, learner, scheduler, reward or environment) may run."""

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
        description="how engines, further reward actors and environment actors are placed on the nodes of the "
        "Ray cluster. spread: on all nodes in turn; pack: by Ray's default rule, which fills one node to half before "
        "the next node",
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
    environment: RolePlacement = RolePlacement()


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


class EnvironmentActorsConfig(Section):
    """The smallest and the largest number of environment actors, which run the worker processes of environments. The
    run starts more of them, up to the largest number, while many episodes run or wait.
    """

    min: int = Field(
        0,
        ge=0,
        le=1024,
        description="smallest number of environment actors; 0: the worker processes of environments run on the node of "
        "the scheduler",
    )
    max: int | None = Field(
        None,
        gt=0,
        le=1024,
        description="largest number of environment actors, which run on different nodes if possible. Each environment "
        "actor runs an equal share of environment.at_once episodes. Default: the value of min",
    )
    grow_seconds: float = Field(
        10.0,
        ge=0,
        le=3600,
        description="another environment actor starts after the episodes have needed it for this number of seconds",
    )
    idle_seconds: float = Field(
        60.0,
        ge=0,
        le=3600,
        description="an environment actor ends after it was not needed for this number of seconds",
    )

    @property
    def most(self) -> int:
        """The largest number of environment actors."""
        return self.min if self.max is None else self.max

    def find_useless(self, *, has_processes: bool) -> Iterator[PydanticCustomError]:
        """Reject environment actors if the environment of the run has no worker processes."""
        if self.most and not has_processes:
            key = "min" if self.max is None else "max"
            cure = "the environment of this run has no worker processes for environment actors; remove the key"
            yield refusal(f"cluster.environment_actors.{key}", self.most, cure)

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.max is not None and not 1 <= self.min <= self.max:
            cure = f"min must be at least 1 and at most max = {self.max}; change min"
            refuse("cluster.environment_actors.min", self.min, cure)
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
    environment_actors: EnvironmentActorsConfig = EnvironmentActorsConfig()
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
                    "this is not a valid name of an environment variable; write letters, digits and _, and no "
                    "digit at the beginning",
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
    """Yield every string in nested mappings and sequences."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping):
        yield from (text for value in tree.values() for text in _list_texts(value))
    elif isinstance(tree, Sequence):
        yield from (text for value in tree for text in _list_texts(value))


def has_password(text: str) -> bool:
    """Return whether a text contains a URL with a password."""
    return bool(re.search(r"://[^/@\s]*:[^/@\s]+@", text))
