"""Stores a user's request to end a run as `stop.json` in the run's storage. A user can therefore end the run from any
machine that reaches the storage. The run's supervisor looks for a request about once a second. Starting or resuming a
run removes earlier requests.
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
    """A user's request to end a run: after the next policy version (`how` is "stop") or at once (`how` is "cancel").

    The field `at` is the time of the request in seconds since the epoch.
    """

    how: How
    at: float


class RunEnded(Exception):
    """The error that is raised when a user ended or paused the run; the run has not failed. The attribute `pause` is
    true if the user paused the run's Prefect flow run, which then waits to be resumed.
    """

    def __init__(self, why: str, *, pause: bool = False) -> None:
        super().__init__(why)
        self.pause = pause


def request_stop(run: ObjectStore, how: How) -> StopRequest:
    """Store a request to end the run; a stored "cancel" request is not replaced by a later "stop" request."""
    before = read_request(run)
    asked = StopRequest(before.how if before is not None and before.how == "cancel" else how, time.time())
    run.put(REQUEST, json.dumps(asdict(asked)).encode())
    return asked


def read_request(run: ObjectStore) -> StopRequest | None:
    """Return the user's request to end the run, or None if there is no request or the request cannot be read."""
    try:
        found = json.loads(run.get(REQUEST))
        return StopRequest(found["how"], float(found["at"])) if found["how"] in get_args(How) else None
    except (Missing, Corrupt, ValueError, KeyError, TypeError):
        return None


def take_back(run: ObjectStore, before: float) -> None:
    """Remove the stop request if it is older than `before`, the time in seconds since the epoch at which the run was
    started or resumed.
    """
    asked = read_request(run)
    if asked is not None and asked.at < before:
        run.delete(REQUEST)
