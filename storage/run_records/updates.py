"""Stores how long each weight update paused the inference engines: one object per policy version,
`updates/<version>.json`.

The rollout stage stores one such object for each policy version that the engines loaded; the engines may skip versions.
Only `rollflow plan` reads the records of weight updates, to fit its simulation to a recorded run.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.objects.base import ObjectStore


@dataclass(frozen=True, slots=True)
class Update:
    """The update of the engines to `version`, for which the engines paused `pause_seconds`.

    No code of a run decides by this record. Only `rollflow plan` reads this record, to fit its simulation to a recorded
    run.

    The engines resumed at `resumed_at` (seconds since the epoch, by the rollout stage's clock).
    """

    version: int
    pause_seconds: float
    resumed_at: float


def update_path(version: int) -> str:
    """Return the path of the update to `version`."""
    return f"updates/{version:08d}.json"


def store_update(run: ObjectStore, update: Update) -> None:
    """Store an update; a record of the same version by an earlier rollout stage is replaced."""
    run.put(update_path(update.version), json.dumps(asdict(update)).encode())


def read_update(run: ObjectStore, version: int) -> Update | None:
    """Read the update to `version`; return None if no update to this version was recorded."""
    path = update_path(version)
    try:
        return Update(**json.loads(run.get(path)))
    except Missing:
        return None
    except (ValueError, TypeError) as error:
        raise Corrupt(f"{path} is not a record of an update: {error}") from error
