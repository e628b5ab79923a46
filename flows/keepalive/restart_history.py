"""What a run's earlier keepers have spent of their budgets, according to its recovery records.

A keeper that is started again (its flow was killed, a supervisor took over) goes on with it. Where a person starts or
resumes the run, the budget begins anew: what used it up has been looked at.

The records are read in the background and waited for a moment at most, once. Storage that does not answer holds up no
restart; until it does, a keeper counts what it has seen itself. A record that is damaged is passed over.

A restart is on record once its recovery is complete: who is killed with one under way takes that one along, and his
own end counts for who keeps him.
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

WAIT_SECONDS = 1.0  # for the records, before the first restart
AGAIN_SECONDS = 1.0
BEGUN = "begun.json"


@dataclass(frozen=True, slots=True)
class Spent:
    """The restarts of one role: when, in seconds since the epoch, and the number of the last."""

    times: tuple[float, ...] = ()
    attempt: int = 0

    def then(self, one: Recovery) -> Spent:
        """With those of the recovery that followed."""
        return Spent((*self.times, *(one.restarts or (one.noticed_at,))), one.attempt)


def begin_anew(run: ObjectStore) -> None:
    """Somebody starts the run, which no recovery does: no budget of it is spent from now on."""
    run.put(BEGUN, json.dumps({"at": time.time()}).encode())


def begun_at(run: ObjectStore) -> float:
    """When somebody last started the run, in seconds since the epoch; 0 where nobody is known to have."""
    try:
        return float(json.loads(run.get(BEGUN))["at"])
    except (Missing, ValueError, KeyError, TypeError):
        return 0.0


def spent(recoveries: Iterable[Recovery], until: float, since: float = 0.0) -> dict[str, Spent]:
    """Restarts by role, of the recoveries (oldest first) that had begun by `until`, and not before `since`."""
    found: dict[str, Spent] = {}
    for one in recoveries:
        if since <= one.noticed_at <= until:
            found[one.role] = found.get(one.role, Spent()).then(one)
    return found


class Earlier:
    """What was spent on a run before now; asked for by role, on `clock`."""

    def __init__(
        self,
        run: ObjectStore,
        window_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`run` may be one that waits long: nobody waits with it."""
        self._window, self._wall, self._clock = window_seconds, wall, clock
        self._began = wall()
        self._found: dict[str, Spent] = {}
        self._read, self._waited = threading.Event(), False
        thread = threading.Thread(target=self._ask, args=(run,), name="spent earlier", daemon=True)
        thread.start()

    def times(self, role: str) -> list[float]:
        """When the role was started again. A clock that has stepped by more than the window tells nothing."""
        ages = [self._wall() - at for at in self._spent(role).times]
        return [self._clock() - max(0.0, age) for age in ages if abs(age) < self._window]

    def attempt(self, role: str) -> int:
        """How often the role had been started again."""
        return self._spent(role).attempt

    def _spent(self, role: str) -> Spent:
        if not self._waited:
            self._waited = True
            self._read.wait(WAIT_SECONDS)
        return self._found.get(role, Spent())

    def _ask(self, run: ObjectStore) -> None:
        while not self._read.is_set():
            try:
                self._found = spent(RecoveryLog(run).read(), self._began, begun_at(run))
            except (Unreachable, OSError):
                time.sleep(AGAIN_SECONDS)
                continue
            except RollflowError:
                pass  # there is no reading it, now or later
            self._read.set()
