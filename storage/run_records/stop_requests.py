"""Requests to end a run: `stop.json` in the run's own storage, so that a request needs no common server or machine.

The run's supervisor looks for a request about once a second. A request applies only to the running supervisor: a start
or a resume of the run removes older requests. Ending a run loses nothing: the run can be resumed from its storage.
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
class StopRequest:
    """How the run should end: at its next version ("stop") or at once ("cancel"), and when that was requested.

    `at` is in seconds since the epoch.
    """

    how: How
    at: float


class RunEnded(Exception):
    """A user ended the run, which has not failed. `pause` is set if the flow run waits to be resumed."""

    def __init__(self, why: str, *, pause: bool = False) -> None:
        super().__init__(why)
        self.pause = pause


def request_stop(run: ObjectStore, how: How) -> StopRequest:
    """Ask the run to end; an earlier "cancel" is stronger than a later "stop"."""
    before = read_request(run)
    asked = StopRequest(before.how if before is not None and before.how == "cancel" else how, time.time())
    run.put(REQUEST, json.dumps(asdict(asked)).encode())
    return asked


def read_request(run: ObjectStore) -> StopRequest | None:
    """Return the request to end the run, or None if there is no request or the request cannot be read."""
    try:
        found = json.loads(run.get(REQUEST))
        return StopRequest(found["how"], float(found["at"])) if found["how"] in get_args(How) else None
    except (Missing, Corrupt, ValueError, KeyError, TypeError):
        return None


def take_back(run: ObjectStore, before: float) -> None:
    """Remove a request from before `before` (seconds since the epoch), when the run was started or resumed."""
    asked = read_request(run)
    if asked is not None and asked.at < before:
        run.delete(REQUEST)
