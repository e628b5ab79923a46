"""`prefect.yaml`: the same deployments for a work pool of somebody's Prefect server, made from the same recipes.

A worker imports rollflow by its modules, so it must be installed where workers run. Nothing is pulled: the file's one
pull step keeps `prefect deploy` from making up another, which takes every entrypoint for a file's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from rollflow.flows.services.registering import Offer

HEAD = """\
# Made by `rollflow deploy --work-pool {pool}`; register it by `prefect deploy --all`, and again after a recipe changed.
# Workers need rollflow installed, a store that all of them reach (store.uri), and a Ray cluster: cluster.address in the
# recipes, or ROLLFLOW_RAY_ADDRESS in the environment of the work pool's jobs.
"""
PULL = [{"prefect.deployments.steps.set_working_directory": {"directory": "."}}]


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
        "work_pool": {"name": pool},
        "enforce_parameter_schema": True,
    }
    return {name: value for name, value in found.items() if value not in ("", [], {})}
