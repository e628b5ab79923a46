"""Implements `rollflow deploy FOLDER`, which makes each recipe of a folder a deployment that users can start in the
Prefect UI.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rollflow.flows.commands.cli.exit_codes import OK
from rollflow.flows.locations import run_home
from rollflow.flows.served_recipes import ServedRecipe, deploy_recipes, recipes_of


def command(options: argparse.Namespace) -> int:
    """Check the recipes of a folder. Add the folder to the folders that `rollflow serve` serves. With `--work-pool`,
    print a `prefect.yaml` for a Prefect work pool instead.
    """
    recipes = recipes_of(options.folder)
    if options.work_pool:
        print(_render_for_pool(recipes, options.work_pool), end="")
        return OK
    deploy_recipes(run_home(), options.folder.absolute())
    for recipe in recipes:
        print(f"post-training/{recipe.config.name}  {recipe.file}")
    print("`rollflow serve` in this home serves them: within seconds if it runs, otherwise from its next start on")
    return OK


def _render_for_pool(recipes: Sequence[ServedRecipe], pool: str) -> str:
    """Return the text of a `prefect.yaml` that deploys the recipes to a Prefect work pool. `prefect.yaml` contains the
    whole configuration of each recipe, because Prefect checks the configuration against the deployment's form.
    """
    from dataclasses import replace

    from rollflow.flows.deployments import list_deployments, offer_recipe
    from rollflow.flows.registration.registering import DeploymentOffer
    from rollflow.flows.registration.work_pool import name_on, prefect_yaml

    def whole(recipe: ServedRecipe) -> DeploymentOffer:
        config = recipe.config.model_dump(mode="json")
        return replace(offer_recipe(recipe), name=name_on(pool, recipe.config.name), parameters={"config": config})

    return prefect_yaml([*list_deployments(name_on(pool)), *map(whole, recipes)], pool)
