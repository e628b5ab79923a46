"""How a stage's flow looks after its actor: life and progress, every second, and never a silent wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rollflow.flows import cluster
from rollflow.storage.errors import RollflowError, Unreachable
from rollflow.tasks.settings import RunConfig

POLL_SECONDS = 1.0
ANSWER_SECONDS = 30.0  # an actor that does not answer its status for so long is stuck


class StageFailed(RollflowError):
    """A stage ended with an error; the message is the reason."""


def watch(
    running: Any, status: Callable[[], Any], patience_seconds: float, log: Callable[[str], None], what: str
) -> Any:
    """Wait for the call `running` of an actor, watching its status; returns the call's result.

    Raises:
        StageFailed: the call raised, its actor died, or its status did not change for `patience_seconds`.
    """
    changed, before = time.monotonic(), None
    while not cluster.done(running, POLL_SECONDS):
        now = progress_of(cluster.call(status(), ANSWER_SECONDS, f"the status of {what}"))
        # A stage that waits for another by design says so; that other one's flow watches it.
        if now != before or now.get("waits_for"):
            changed, before = time.monotonic(), now
        if time.monotonic() - changed > patience_seconds:
            raise StageFailed(f"{what} made no progress for {patience_seconds:g} s; last seen: {before}")
    try:
        return cluster.call(running, ANSWER_SECONDS, what)
    except Unreachable as error:
        raise StageFailed(str(error)) from error
    finally:
        log(f"{what}: {before}")


def gpu_share(config: RunConfig) -> float:
    """GPUs for each engine and the learner: a whole one where there are enough, else equal shares; 0 on CPU."""
    workers = config.engine.replicas + 1
    return min(1.0, int(100 * cluster.gpus() / workers) / 100)


def progress_of(status: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a status that only changes when something was done."""
    return {k: v for k, v in status.items() if k not in ("idle", "seconds")}
