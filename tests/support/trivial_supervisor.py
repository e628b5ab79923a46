"""Runs a trivial "post-training" flow, which counts until the object `go` is in the run's storage, and then ends the
run.

The flow's status contains its process id, so that a test can kill the process. If the object `fail` is in the storage,
the flow raises an error.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from rollflow.flows.locations import attach_run
from rollflow.flows.views.status import STATUS, Phase, RunStatus

NAME = "trivial"


@flow(name="post-training")
def post_training(config: dict[str, Any], run_id: str | None = None, storage: str | None = None) -> None:
    """Count versions."""
    assert storage is not None
    context = attach_run(storage)
    began, version = context.created_at, 0

    def tell(phase: Phase) -> None:
        seconds, pid = time.time() - began, str(os.getpid())
        status = RunStatus(
            context.run_id, phase, version=version, seconds=seconds, messages=(pid,), flow_run=str(flow_run.id)
        )
        context.store.put(STATUS, status.to_json().encode())

    while not context.store.exists("go"):
        version += 1
        tell("training")
        if context.store.exists("fail"):
            raise ValueError("told to fail")
        time.sleep(0.2)
    context.store.put("summary.json", b"{}")
    tell("done")


def main() -> None:
    from rollflow.flows.deployments import serve
    from rollflow.flows.recover import recover
    from rollflow.flows.registration.registering import DeploymentOffer
    from tests.support.trivial_supervisor import (
        post_training,  # the imported flow and not that of `__main__`, because flow processes import it by name
    )

    parser = argparse.ArgumentParser()
    parser.add_argument("--ready", type=Path)
    parser.add_argument("--automations", action="store_true")
    given = parser.parse_args()
    asyncio.run(
        serve(
            [DeploymentOffer(one, NAME) for one in (post_training, recover)], given.ready, automations=given.automations
        )
    )


if __name__ == "__main__":
    main()
