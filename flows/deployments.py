"""Runs a Prefect runner, which serves rollflow's flows as deployments. Users start a deployment from the Prefect UI, or
a schedule starts it.

The runner of `rollflow run` serves six flows as deployments with the name of the run. The runner of `rollflow serve`
serves the six flows with the name "rollflow", and one more deployment of `post-training` for each offered recipe. The
runner asks Prefect for scheduled flow runs every second, because with Prefect's default of ten seconds, the flows of a
run would start late. If no command watches the runner, Prefect automations restart crashed runs (see
`registration/automations.py`).

`python -m rollflow.flows.deployments [--ready FILE] [--no-automations]` serves the flows until the process is stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast
from uuid import UUID, uuid4

from prefect.runner import Runner

from rollflow.flows.evaluate import evaluate
from rollflow.flows.keepalive.stages import runner_deployment
from rollflow.flows.locations import run_home
from rollflow.flows.nightly import Nightly, nightly, read_nightly
from rollflow.flows.post_training import post_training
from rollflow.flows.recover import recover
from rollflow.flows.registration.automations import HEARTBEAT_SECONDS, install_automations
from rollflow.flows.registration.form import form_values
from rollflow.flows.registration.prefect_api import (
    INTERNAL,
    NIGHTLY,
    OF_SESSION,
    RECIPE,
    SERVED,
    call_until_answered,
    deployment_names,
)
from rollflow.flows.registration.registering import DeploymentOffer, home_tag, list_superseded
from rollflow.flows.reward import reward
from rollflow.flows.rollout import rollout
from rollflow.flows.served_recipes import ServedRecipe, recipes_file, served_files, served_recipes
from rollflow.flows.services.flow_process import fork_flows
from rollflow.flows.tracking.tracking import import_early
from rollflow.flows.train import train
from rollflow.storage.errors import ConfigError, Unreachable

POLL_SECONDS = 1
BEGIN_SECONDS = 0.05
LOOK_SECONDS = 2.0  # Seconds between two checks for newly deployed recipes.
# Largest number of flow runs at the same time. A training run has four flow runs; Prefect's default limit is 5.
LIMIT = 40
FLOWS = (post_training, rollout, reward, train, evaluate, recover)


def list_deployments(name: str | None = None) -> list[DeploymentOffer]:
    """Return the Prefect deployments of rollflow's six flows. The deployments are called `name`. By default, they have
    the name of the deployments that this Prefect runner serves.
    """
    session = name is None and runner_deployment() != SERVED
    tags = (INTERNAL, OF_SESSION, home_tag(run_home())) if session else (INTERNAL,)
    name = name or runner_deployment()
    return [
        DeploymentOffer(flow, deployment_names(name)[0], description=flow.__doc__ or "", tags=tags) for flow in FLOWS
    ]


def offer_recipe(recipe: ServedRecipe) -> DeploymentOffer:
    """Return a Prefect deployment of the flow `post-training` with this recipe as its default parameters."""
    text = f"{recipe.about}\n\nThe recipe: `{recipe.file}`".strip()
    return DeploymentOffer(
        post_training, recipe.config.name, {"config": form_values(recipe.config)}, text, (RECIPE,), hidden=("storage",)
    )


def offer_nightly(plan: Nightly) -> DeploymentOffer:
    """Return the Prefect deployment of a nightly file, which lists recipes to train every night. The deployment has the
    file's schedule, and at most one flow run at a time.
    """
    parameters, text = (
        {"plan": plan.model_dump(mode="json", exclude_none=True)},
        (nightly.__doc__ or "").partition("\n")[0],
    )
    cron = (plan.cron, plan.timezone)
    return DeploymentOffer(nightly, plan.name, parameters, text, (NIGHTLY,), limit=1, cron=cron)


def offer_recipes() -> list[DeploymentOffer]:
    """Return one Prefect deployment for each served recipe, and one for each nightly file (a list of recipes to train
    every night). Invalid files are reported and skipped.
    """

    def tell(error: object) -> None:
        print(f"This recipe is not served: {error}", file=sys.stderr, flush=True)

    made = [offer_recipe(recipe) for recipe in served_recipes(tell)]
    for file in served_files():
        try:
            made.append(offer_nightly(read_nightly(file)))
        except ConfigError as error:
            tell(error)
    return made


def build_runner(heartbeat_seconds: int | None) -> Runner:
    """Build the Prefect runner, whose working folder is in the run home (rollflow's folder for local files).

    Prefect's default working folder, /tmp/runner_storage, is writable only for the user who first started a runner on
    this machine.
    """
    runner = Runner(
        name="rollflow",
        query_seconds=POLL_SECONDS,
        pause_on_shutdown=False,
        limit=LIMIT,
        heartbeat_seconds=heartbeat_seconds,
    )
    runner._tmp_dir = run_home() / "cache" / "runner_storage" / str(uuid4())
    return runner


async def serve(
    made: Iterable[DeploymentOffer], ready: Path | None, *, automations: bool, recipes: bool = False
) -> None:
    """Register the deployments with Prefect, and execute their flow runs until this process is stopped."""
    runner = build_runner(HEARTBEAT_SECONDS if automations else None)
    ids: dict[str, UUID] = {}

    async def add(offers: Iterable[DeploymentOffer]) -> None:
        for one in offers:
            ids[f"{one.flow_name}/{one.name}"] = await runner.aadd_deployment(cast(Any, one))
        if automations:
            await asyncio.to_thread(call_until_answered, lambda: install_automations(runner_deployment(), ids))

    made = list(made)
    if recipes:
        made += [*offer_recipes(), *await asyncio.to_thread(call_until_answered, lambda: list_superseded(made, SERVED))]
    await add(made)
    if ready:
        ready.touch()
    following = asyncio.create_task(_follow_recipes(add)) if recipes else None
    await runner.start()
    if following:
        following.cancel()


async def _follow_recipes(add: Any) -> None:
    """Serve each recipe that `rollflow deploy` adds while this Prefect runner is running. If a recipe cannot be served,
    report the reason and try again later.
    """
    seen, reported = _modified_at(), ""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        if (now := _modified_at()) == seen:
            continue
        try:
            await add(offer_recipes())
            seen = now
        except (Unreachable, ConfigError) as error:
            if (message := f"The recipe is not served yet: {error}") != reported:
                print(message, file=sys.stderr, flush=True)
            reported = message


def _modified_at() -> int:
    file = recipes_file(run_home())
    return file.stat().st_mtime_ns if file.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description="serve rollflow's flows as Prefect deployments")
    parser.add_argument("--begin", type=Path, help="file for which the process waits after its imports")
    parser.add_argument("--ready", type=Path, help="file that is created as soon as the deployments are registered")
    parser.add_argument(
        "--no-automations",
        action="store_true",
        help="install no automations, because another process restarts crashed runs",
    )
    given = parser.parse_args()
    import_early()
    fork_flows(__spec__.name)
    # The process that started this runner creates the file `begin` once the Prefect server runs.
    while given.begin and not given.begin.exists():
        time.sleep(BEGIN_SECONDS)
    recipes = runner_deployment() == SERVED
    asyncio.run(serve(list_deployments(), given.ready, automations=not given.no_automations, recipes=recipes))


if __name__ == "__main__":
    main()
