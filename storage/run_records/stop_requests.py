"""A person asks a run to end: `stop.json` in the run's own storage, so that no server and no machine must be the same.

The run's supervisor looks for it about once a second. It is for the run as it goes now: who starts or resumes the run
takes it away. Nothing is lost by it: a run that was ended goes on from its storage.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.objects.base import ObjectStore

REQUEST = "stop.json"
How = Literal["stop", "cancel"]


@dataclass(frozen=True, slots=True)
class Request:
    """How the run is to end: at its next version ("stop") or at once ("cancel"), and when that was asked for.

    `at` is in seconds since the epoch.
    """

    how: How
    at: float


class Ended(Exception):
    """A person ended the run; it has not failed. `pause` where the flow run waits for its resumption."""

    def __init__(self, why: str, *, pause: bool = False) -> None:
        super().__init__(why)
        self.pause = pause


def ask(run: ObjectStore, how: How) -> Request:
    """Ask the run to end, now; a "cancel" stays one where a "stop" follows."""
    before = requested(run)
    asked = Request(before.how if before is not None and before.how == "cancel" else how, time.time())
    run.put(REQUEST, json.dumps(asdict(asked)).encode())
    return asked


def requested(run: ObjectStore) -> Request | None:
    """What was asked of the run as it goes now; one that cannot be read is none."""
    try:
        found = json.loads(run.get(REQUEST))
        return Request(found["how"], float(found["at"])) if found["how"] in get_args(How) else None
    except (Missing, Corrupt, ValueError, KeyError, TypeError):
        return None


def take_back(run: ObjectStore, before: float) -> None:
    """The run was started or resumed at `before` (seconds since the epoch): what was asked of it until then is done."""
    asked = requested(run)
    if asked is not None and asked.at < before:
        run.delete(REQUEST)
