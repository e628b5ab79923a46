"""Defines the `[cluster]` section of a run's config: the Ray cluster, and the nodes and environment of its Ray actors.

The config of a run is stored, so this section of the config rejects secrets. This module imports only pydantic.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rollflow.tasks.runtime.sections import LONGEST_SECONDS, Section, refuse


class RolePlacement(Section):
    """The nodes that may run the actors of a role."""

    labels: dict[str, str] = Field(
        default_factory=dict,
        description='Ray labels that a node must have to run this role, e.g. {"ray.io/market-type" = "spot"}',
    )
    resource: str | None = Field(
        None,
        min_length=1,
        description="custom Ray resource that a node must have to run this role; each actor reserves 0.001 of the "
        "resource",
    )


class PlacementConfig(Section):
    """The placement of a run's actors on the cluster, and the resources that they reserve besides their GPUs."""

    strategy: Literal["spread", "pack"] = Field(
        "spread",
        description="how engines are placed on nodes. spread: on the nodes in turn; pack: as Ray packs actors, "
        "which fills a node to half before it uses the next one",
    )
    reserve_cpus: bool = Field(
        False,
        description="whether Ray reserves CPUs for the threads of the run's actors; false: other work may use these "
        "CPUs",
    )
    engine: RolePlacement = RolePlacement()
    learner: RolePlacement = RolePlacement()
    scheduler: RolePlacement = RolePlacement()
    reward: RolePlacement = RolePlacement()


SECRET_NAME = re.compile(r"SECRET|PASSWORD|PASSWD|CREDENTIAL|PRIVATE_KEY|API_KEY|AUTH_STRING|(^|_)(TOKEN|KEY)$", re.I)
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ClusterConfig(Section):
    """The Ray cluster that the run uses."""

    address: str = Field(
        "auto", description="address of a Ray head as host:port; auto: a private cluster on this machine"
    )
    lease_seconds: float = Field(
        600.0,
        ge=0,
        le=LONGEST_SECONDS,
        description="seconds without a supervisor after which the run's actors end and free their GPUs; 0: never",
    )
    placement: PlacementConfig = PlacementConfig()
    env: dict[str, str] = Field(
        default_factory=dict,
        description='environment variables of the run\'s actors, e.g. {NCCL_SOCKET_IFNAME = "eth0"}',
    )
    runtime_env: dict[str, Any] = Field(
        default_factory=dict, description="Ray's runtime_env of the run's actors, without env_vars"
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
