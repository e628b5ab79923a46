"""Implements `rollflow nightly FILE`, which trains recipes every night, on a schedule that the Prefect UI shows."""

from __future__ import annotations

import argparse

from rollflow.flows.commands.cli.exit_codes import OK
from rollflow.flows.locations import run_home
from rollflow.flows.nightly import read_nightly
from rollflow.flows.served_recipes import deploy_recipes


def command(options: argparse.Namespace) -> int:
    """Check the nightly file, and add its schedule to the deployments of `rollflow serve`."""
    plan = read_nightly(options.file)
    deploy_recipes(run_home(), options.file.absolute())
    recipes = f"{len(plan.recipes)} recipes, one after the other" if len(plan.recipes) > 1 else "1 recipe"
    print(f"nightly/{plan.name}  {plan.cron} ({plan.timezone}), {recipes}")
    print("`rollflow serve` in this home starts it: within seconds if it runs, otherwise from its next start on")
    return OK
