"""Reads from a run's recovery records how often earlier processes restarted each component of the run. Restarts by
earlier processes still count against the limit, until a user starts or resumes the run.

A background thread reads the recovery records, and the first restart waits at most `WAIT_SECONDS` for them. A damaged
record is skipped. A restart is recorded only when the component works again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rollflow.storage.errors import Missing, RollflowError, Unreachable
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.run_records.recoveries import Recovery, RecoveryLog

WAIT_SECONDS = 1.0  # Longest wait in seconds of the first restart for the recovery records.
AGAIN_SECONDS = 1.0
BEGUN = "begun.json"


@dataclass(frozen=True, slots=True)
class PastRestarts:
    """The past restarts of one component, such as an engine: their times in seconds since the epoch, and the number of
    the newest restart.
    """

    times: tuple[float, ...] = ()
    attempt: int = 0

    def then(self, recovery: Recovery) -> PastRestarts:
        """Return a copy of these past restarts to which the restarts of `recovery` are added."""
        return PastRestarts((*self.times, *(recovery.restarts or (recovery.noticed_at,))), recovery.attempt)


def reset_budgets(run: ObjectStore) -> None:
    """Reset the run's limits on restarts, so that earlier restarts no longer count."""
    run.put(BEGUN, json.dumps({"at": time.time()}).encode())


def read_reset_time(run: ObjectStore) -> float:
    """Return the time in seconds since the epoch at which a user last started the run. Return 0 if the time of the
    start is unknown.
    """
    try:
        return float(json.loads(run.get(BEGUN))["at"])
    except (Missing, ValueError, KeyError, TypeError):
        return 0.0


def count_restarts(recoveries: Iterable[Recovery], until: float, since: float = 0.0) -> dict[str, PastRestarts]:
    """Count the restarts of each component (such as an engine). `recoveries` lists recovery records, oldest first. Only
    failures that were noticed between `since` and `until` count.
    """
    by_role: dict[str, PastRestarts] = {}
    for recovery in recoveries:
        if since <= recovery.noticed_at <= until:
            by_role[recovery.role] = by_role.get(recovery.role, PastRestarts()).then(recovery)
    return by_role


class RestartHistory:
    """The restarts of a run's components, such as actors and engines, that earlier processes made."""

    def __init__(
        self,
        run: ObjectStore,
        window_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Start reading the recovery records in a background thread."""
        self._window, self._wall, self._clock = window_seconds, wall, clock
        self._began = wall()
        self._found: dict[str, PastRestarts] = {}
        self._read, self._waited = threading.Event(), False
        thread = threading.Thread(target=self._ask, args=(run,), name="spent earlier", daemon=True)
        thread.start()

    def times(self, role: str) -> list[float]:
        """Return the times at which earlier processes restarted the component, as readings of `clock`. A restart is
        left out if its time differs from now by more than the time window, in the past or in the future.
        """
        ages = [self._wall() - at for at in self._find_past(role).times]
        return [self._clock() - max(0.0, age) for age in ages if abs(age) < self._window]

    def attempt(self, role: str) -> int:
        """Return how often earlier processes restarted the component."""
        return self._find_past(role).attempt

    def _find_past(self, role: str) -> PastRestarts:
        if not self._waited:
            self._waited = True
            self._read.wait(WAIT_SECONDS)
        return self._found.get(role, PastRestarts())

    def _ask(self, run: ObjectStore) -> None:
        while not self._read.is_set():
            try:
                self._found = count_restarts(RecoveryLog(run).read(), self._began, read_reset_time(run))
            except (Unreachable, OSError):
                time.sleep(AGAIN_SECONDS)
                continue
            except RollflowError:
                pass  # The recovery records are damaged, so reading them again would not help.
            self._read.set()
