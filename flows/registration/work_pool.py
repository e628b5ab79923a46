"""Writes the file `prefect.yaml`, which defines deployments of recipes for a work pool on the user's own Prefect
server.

Each deployment's name ends with the work pool's name, so that the runner of `rollflow serve` does not take its flow
runs. A run on a work pool starts its flows for rollout, reward and training on the same pool. rollflow must be
installed on the machines of the pool's workers. The file contains a pull step without effect, because `prefect deploy`
would otherwise add a step that takes every entrypoint for a file path.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from rollflow.flows.registration.prefect_api import SERVED
from rollflow.flows.registration.registering import DeploymentOffer

HEAD = """\
# Made by `rollflow deploy --work-pool {pool}`; register it by `prefect deploy --all`, and again after a recipe changed.
# Workers need rollflow installed, and in their environment or that of the work pool's jobs:
#   ROLLFLOW_HOME         a permanent folder: a worker's own working folders are temporary
#   ROLLFLOW_STORE        a store that all workers reach, for recipes without store.uri
#   ROLLFLOW_RAY_ADDRESS  a Ray cluster, for recipes without cluster.address
"""
PULL = [{"prefect.deployments.steps.set_working_directory": {"directory": "."}}]


def name_on(pool: str, name: str = SERVED) -> str:
    """Return the name of a Prefect deployment on this work pool."""
    return f"{name}@{pool}"


def prefect_yaml(offers: Iterable[DeploymentOffer], pool: str) -> str:
    """Return the text of the file `prefect.yaml`. Deploying `prefect.yaml` again overwrites default parameters that a
    user changed in the Prefect UI.
    """
    tree = {"name": "rollflow", "pull": PULL, "deployments": [_deployment(offer, pool) for offer in offers]}
    text: str = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100)
    return HEAD.format(pool=pool) + text


def _deployment(offer: DeploymentOffer, pool: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": offer.name,
        "entrypoint": offer.entrypoint,
        "description": offer.description,
        "tags": list(offer.tags),
        "parameters": dict(offer.parameters),
        "work_pool": {"name": pool, "job_variables": {"env": {"ROLLFLOW_DEPLOYMENT": name_on(pool)}}},
        "enforce_parameter_schema": True,
    }
    return {name: value for name, value in found.items() if value not in ("", [], {})}
