"""`rollflow deploy FOLDER`: each recipe of a folder becomes a deployment in the Prefect UI."""

from __future__ import annotations

import argparse

from rollflow.flows.commands import OK
from rollflow.flows.locations import home
from rollflow.flows.served_recipes import deploy, recipes_of


def command(options: argparse.Namespace) -> int:
    """Check the recipes, and have them served by `rollflow up`, now or when it starts."""
    recipes = recipes_of(options.folder)
    deploy(home(), options.folder.absolute())
    for recipe in recipes:
        print(f"post-training/{recipe.config.name}  {recipe.file}")
    print("`rollflow up` in this home serves them: one that is up within seconds, else from its next start on")
    return OK
