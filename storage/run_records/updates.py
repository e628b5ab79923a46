"""Stores how long each weight update paused the inference engines: one object per policy version,
`updates/<version>.json`. Only `rollflow plan` reads the records of weight updates, to fit its simulation to a recorded
run.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.objects.base import ObjectStore


@dataclass(frozen=True, slots=True)
class Update:
    """The update of the inference engines to the weights of policy version `version`. The engines paused for
    `pause_seconds`.

    The engines resumed generation at `resumed_at` (seconds since the epoch, by the rollout stage's clock).
    """

    version: int
    pause_seconds: float
    resumed_at: float


def update_path(version: int) -> str:
    """Return the path of the record of the engines' update to policy version `version`."""
    return f"updates/{version:08d}.json"


def store_update(run: ObjectStore, update: Update) -> None:
    """Store the record of a weight update; an earlier rollout stage's record for the same policy version is
    replaced."""
    run.put(update_path(update.version), json.dumps(asdict(update)).encode())


def read_update(run: ObjectStore, version: int) -> Update | None:
    """Read the record of the engines' update to policy version `version`; return None if no such update was
    recorded."""
    path = update_path(version)
    try:
        return Update(**json.loads(run.get(path)))
    except Missing:
        return None
    except (ValueError, TypeError) as error:
        raise Corrupt(f"{path} is not a record of an update: {error}") from error
