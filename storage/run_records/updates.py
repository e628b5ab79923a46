"""What each weight update cost: one small object per policy version, `updates/<version>.json`.

Written by the rollout stage, once for each version that the engines took (they skip some). It is for people and for
predictions; nothing that decides reads it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.objects.base import ObjectStore


@dataclass(frozen=True, slots=True)
class Update:
    """The engines took `version`: they stood still for `pause_seconds`, and went on at `resumed_at` (since the epoch,
    by the rollout stage's clock)."""

    version: int
    pause_seconds: float
    resumed_at: float


def update_path(version: int) -> str:
    """Where the update to `version` lies."""
    return f"updates/{version:08d}.json"


def store_update(run: ObjectStore, update: Update) -> None:
    """Write it down; a rollout stage that began again replaces what its predecessor wrote of the same version."""
    run.put(update_path(update.version), json.dumps(asdict(update)).encode())


def read_update(run: ObjectStore, version: int) -> Update | None:
    """The update to `version`, if it was taken and written down."""
    path = update_path(version)
    try:
        return Update(**json.loads(run.get(path)))
    except Missing:
        return None
    except (ValueError, TypeError) as error:
        raise Corrupt(f"{path} is not an update: {error}") from error
