"""`prefect.yaml`: the same deployments for a work pool of somebody's Prefect server, made from the same recipes.

Their names end with the pool's: a stack or `rollflow serve` on that server has deployments of its own, and its runner
would take the flow runs of namesakes away from the workers. A run on the pool starts its stages there, too.

A worker imports rollflow by its modules, so it must be installed where workers run. Nothing is pulled: the file's one
pull step keeps `prefect deploy` from making up another, which takes every entrypoint for a file's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from rollflow.flows.services.prefect_api import SERVED
from rollflow.flows.services.registering import Offer

HEAD = """\
# Made by `rollflow deploy --work-pool {pool}`; register it by `prefect deploy --all`, and again after a recipe changed.
# Workers need rollflow installed, and in their environment or that of the work pool's jobs:
#   ROLLFLOW_HOME         a folder that stays: a worker's own working folders do not
#   ROLLFLOW_STORE        a store that all of them reach, where a recipe has no store.uri
#   ROLLFLOW_RAY_ADDRESS  a Ray cluster, where a recipe has no cluster.address
"""
PULL = [{"prefect.deployments.steps.set_working_directory": {"directory": "."}}]


def name_on(pool: str, name: str = SERVED) -> str:
    """What a deployment is called that this pool has; by default, what its stages are."""
    return f"{name}@{pool}"


def prefect_yaml(offers: Iterable[Offer], pool: str) -> str:
    """The file's text. What it registers follows the file: a default that was changed in the UI does not stay."""
    tree = {"name": "rollflow", "pull": PULL, "deployments": [_deployment(offer, pool) for offer in offers]}
    text: str = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100)
    return HEAD.format(pool=pool) + text


def _deployment(offer: Offer, pool: str) -> dict[str, Any]:
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
