"""The cost of each weight update: one small object per policy version, `updates/<version>.json`.

The rollout stage writes one object for each version that the engines loaded; engines skip some versions. People and
predictions read these objects. No decision of a run depends on them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.objects.base import ObjectStore


@dataclass(frozen=True, slots=True)
class Update:
    """The update of the engines to `version`, for which the engines paused `pause_seconds`.

    The engines resumed at `resumed_at` (seconds since the epoch, by the rollout stage's clock).
    """

    version: int
    pause_seconds: float
    resumed_at: float


def update_path(version: int) -> str:
    """Return the path of the update to `version`."""
    return f"updates/{version:08d}.json"


def store_update(run: ObjectStore, update: Update) -> None:
    """Store an update; a restarted rollout stage replaces its predecessor's record of the same version."""
    run.put(update_path(update.version), json.dumps(asdict(update)).encode())


def read_update(run: ObjectStore, version: int) -> Update | None:
    """Read the update to `version`; None if there is no record."""
    path = update_path(version)
    try:
        return Update(**json.loads(run.get(path)))
    except Missing:
        return None
    except (ValueError, TypeError) as error:
        raise Corrupt(f"{path} is not a record of an update: {error}") from error
