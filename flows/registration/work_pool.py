"""Writes `prefect.yaml`: deployments of the recipes for a work pool on the user's own Prefect server.

The name of a deployment in `prefect.yaml` ends with the pool's name. If a work pool and `rollflow serve` had
deployments with equal names, the runner of `serve` would take flow runs away from the pool's workers. A run on a work
pool starts its stages on the same pool.

Workers import rollflow as an installed package, so rollflow must be installed where workers run. `prefect.yaml` has a
pull step without effect, because otherwise `prefect deploy` adds its own pull step, which takes every entrypoint for a
file path.
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
    """Return a deployment's name on this work pool; by default, the name of the deployments of the stages."""
    return f"{name}@{pool}"


def prefect_yaml(offers: Iterable[DeploymentOffer], pool: str) -> str:
    """Return the text of `prefect.yaml`. Registering `prefect.yaml` again overwrites defaults that were changed in the
    Prefect UI.
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
