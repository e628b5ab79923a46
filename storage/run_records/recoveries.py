"""What died and was brought back: one object for each recovery of a run, `recoveries/<n>.json`.

Any process may append. It takes a number by an atomic create, and the next number if that one is taken. The records are
for people, the summary and MLflow, and for a keeper that follows another one and goes on with its budget. Nothing waits
for them (see `Notes`), and one that is damaged is passed over: a damaged record never ends a run.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter, ValidationError

from rollflow.storage.errors import Conflict, Corrupt, RollflowError
from rollflow.storage.objects.base import ObjectStore, first_missing

AGAIN_SECONDS = 1.0
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Recovery:
    """One recovery. Times are seconds since the epoch, by the clock of the process that recovered it."""

    role: str  # "learner", "engine-0", "rollout stage", "supervisor", ...
    reason: str  # what was seen when it ended
    noticed_at: float
    restored_at: float  # its successor was up
    resumed_at: float  # its successor had made progress
    redone: str = "nothing"  # the work that has to be done again
    trajectories: int = 0  # trajectories among that work: they are generated again
    attempt: int = 1  # the number of this role's last restart, from 1
    restarts: tuple[float, ...] = ()  # when each of its restarts was decided on: every successor but the last died

    @property
    def seconds(self) -> float:
        """From the moment the end was noticed until there was progress again."""
        return self.resumed_at - self.noticed_at

    def sentence(self) -> str:
        """For a log line."""
        return f"{self.role}: {self.reason}; back after {self.seconds:.1f} s; done again: {self.redone}"


RECOVERY: TypeAdapter[Recovery] = TypeAdapter(Recovery)


def recovery_path(number: int) -> str:
    """Where recovery `number` lies."""
    return f"recoveries/{number:08d}.json"


class RecoveryLog:
    """The recoveries of one run, oldest first."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._known: list[Recovery] = []
        self.damaged: list[str] = []  # objects that are no recovery
        self._unsure: int | None = None  # the number under which a failed `append` may have written after all

    def append(self, recovery: Recovery) -> int:
        """Write a recovery down; returns its number. A call that failed may be repeated: the record is there once."""
        data = json.dumps(asdict(recovery)).encode()
        if self._unsure is None:
            self._unsure = first_missing(self.store, recovery_path, self._read)
        while True:
            try:
                self.store.create(recovery_path(self._unsure), data)
            except Conflict:
                if self.store.get(recovery_path(self._unsure)) != data:
                    self._unsure += 1
                    continue
            number, self._unsure = self._unsure, None
            return number

    @property
    def _read(self) -> int:
        return len(self._known) + len(self.damaged)

    def read(self) -> list[Recovery]:
        """All recoveries that can be read; asks the store only for the ones it has not seen."""
        for number in range(self._read, first_missing(self.store, recovery_path, self._read)):
            path = recovery_path(number)
            try:
                self._known.append(RECOVERY.validate_json(self.store.get(path)))
            except (ValidationError, Corrupt):
                self.damaged.append(path)
        return list(self._known)


class Notes:
    """Recoveries on their way into a run's log: `add` returns at once; what cannot be stored is tried again."""

    def __init__(self, store: ObjectStore) -> None:
        self._recoveries = RecoveryLog(store)
        self._waiting: deque[Recovery] = deque()
        self._lock = threading.Lock()

    def add(self, recovery: Recovery) -> None:
        """Have it stored."""
        with self._lock:
            self._waiting.append(recovery)
            if len(self._waiting) == 1:  # a daemon: a store that is away must not keep the process from ending
                threading.Thread(target=self._store, name="recovery notes", daemon=True).start()

    def flush(self, seconds: float = 10.0) -> bool:
        """Wait until all are stored; false if they were not within `seconds`."""
        limit = time.monotonic() + seconds
        while self._waiting and time.monotonic() < limit:
            time.sleep(POLL_SECONDS)
        return not self._waiting

    def _store(self) -> None:
        while True:
            try:
                self._recoveries.append(self._waiting[0])
            except (RollflowError, OSError):
                time.sleep(AGAIN_SECONDS)
                continue
            with self._lock:
                self._waiting.popleft()
                if not self._waiting:
                    return
