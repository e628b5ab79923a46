"""Counts the restarts that earlier processes made in a run, from the run's recovery records.

A keeper is an object that restarts a run's actors, engines or stages; after its own restart a keeper continues with the
same restart budget. If a user starts or resumes a run, the run's restart budgets are reset.

A background thread reads the records; the first restart waits for this thread for at most `WAIT_SECONDS`. Until the
storage answers, a keeper counts only its own restarts. A damaged record is skipped.

A restart is recorded when its recovery is complete, that is, when the component works again. If a keeper dies before
the recovery of a component is complete, the component's restart is not recorded.
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

WAIT_SECONDS = 1.0  # longest wait before the first restart until the recovery records are read
AGAIN_SECONDS = 1.0
BEGUN = "begun.json"


@dataclass(frozen=True, slots=True)
class PastRestarts:
    """The restarts of one component (such as an engine): their times in seconds since the epoch, and the newest one's
    number.
    """

    times: tuple[float, ...] = ()
    attempt: int = 0

    def then(self, recovery: Recovery) -> PastRestarts:
        """Return a copy that also counts the restarts of `recovery`."""
        return PastRestarts((*self.times, *(recovery.restarts or (recovery.noticed_at,))), recovery.attempt)


def reset_budgets(run: ObjectStore) -> None:
    """Reset the run's restart budgets; called when a user or a schedule starts the run."""
    run.put(BEGUN, json.dumps({"at": time.time()}).encode())


def read_reset_time(run: ObjectStore) -> float:
    """Return the time at which a user last started the run, in seconds since the epoch; 0 if the time is unknown."""
    try:
        return float(json.loads(run.get(BEGUN))["at"])
    except (Missing, ValueError, KeyError, TypeError):
        return 0.0


def count_restarts(recoveries: Iterable[Recovery], until: float, since: float = 0.0) -> dict[str, PastRestarts]:
    """Count the restarts of each component, from recoveries (oldest first) whose failure was noticed between `since`
    and `until`.
    """
    by_role: dict[str, PastRestarts] = {}
    for recovery in recoveries:
        if since <= recovery.noticed_at <= until:
            by_role[recovery.role] = by_role.get(recovery.role, PastRestarts()).then(recovery)
    return by_role


class RestartHistory:
    """The restarts of a run's components, such as actors and stages, before this process began."""

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
        """Return the times of the component's earlier restarts, as readings of `clock`. A restart that lies outside the
        window, in the past or in the future, is left out.
        """
        ages = [self._wall() - at for at in self._find_past(role).times]
        return [self._clock() - max(0.0, age) for age in ages if abs(age) < self._window]

    def attempt(self, role: str) -> int:
        """Return how often the component was restarted before this process began."""
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
                pass  # the records are damaged, so reading them again would not help
            self._read.set()
