"""The runner: serves the six flows as Prefect deployments, so that runs can be started from the UI or a schedule.

`python -m rollflow.flows.deployments [--ready FILE] [--no-automations]` serves until it is told to stop. It polls every
second, because a run's stages should not wait for the default ten. A session such as `rollflow run` watches it. Without
a session, automations do: see `services/automations.py`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import cast
from uuid import UUID

from prefect.deployments.runner import RunnerDeployment
from prefect.runner import Runner
from prefect.types.entrypoint import EntrypointType

from rollflow.flows.evaluate import evaluate
from rollflow.flows.keepalive.stages import deployment
from rollflow.flows.post_training import post_training
from rollflow.flows.recover import recover
from rollflow.flows.reward import reward
from rollflow.flows.rollout import rollout
from rollflow.flows.services.automations import HEARTBEAT_SECONDS, install
from rollflow.flows.services.prefect_api import insist
from rollflow.flows.train import train

POLL_SECONDS = 1
LIMIT = 40  # flow runs at a time; one run has four, and Prefect's default is 5
FLOWS = (post_training, rollout, reward, train, evaluate, recover)


def deployments() -> list[RunnerDeployment]:
    """One deployment per flow, by module path: a file path would give the flow a wrong `__module__`."""
    name, by_module = deployment(), EntrypointType.MODULE_PATH
    made = [flow.to_deployment(name=name, entrypoint_type=by_module, description=flow.__doc__) for flow in FLOWS]
    return cast(list[RunnerDeployment], made)  # outside an event loop it answers at once


async def serve(made: Sequence[RunnerDeployment], ready: Path | None, *, automations: bool) -> None:
    """Register the deployments and run what is asked of them."""
    beat = HEARTBEAT_SECONDS if automations else None
    runner = Runner(
        name="rollflow", query_seconds=POLL_SECONDS, pause_on_shutdown=False, limit=LIMIT, heartbeat_seconds=beat
    )
    ids: dict[str, UUID] = {}
    for one in made:
        ids[str(one.flow_name)] = await runner.aadd_deployment(one)
    if automations:
        await asyncio.to_thread(insist, lambda: install(deployment(), ids))
    if ready:
        ready.touch()
    await runner.start()


def main() -> None:
    parser = argparse.ArgumentParser(description="serve rollflow's flows as Prefect deployments")
    parser.add_argument("--ready", type=Path, help="a file to make once the deployments are registered")
    parser.add_argument("--no-automations", action="store_true", help="somebody else starts crashed runs again")
    given = parser.parse_args()
    asyncio.run(serve(deployments(), given.ready, automations=not given.no_automations))


if __name__ == "__main__":
    main()
