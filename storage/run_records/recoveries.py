"""Stores the recoveries of a run: one object, `recoveries/<n>.json`, for each dead process that was restarted and made
progress again. A restarted supervisor reads from the recoveries how often each role was restarted, which limits further
restarts. A background thread stores the records, so that no restart waits for storage.
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
    """The record of a dead process's restart, up to the moment when the new process had made progress.

    The times in a recovery are seconds since the epoch, by the clock of the process that restarted the dead process.
    """

    role: str  # "learner", "engine-0", "rollout stage", "supervisor", ...
    reason: str  # why the process ended, if the reason is known
    noticed_at: float
    restored_at: float  # when the new process was up
    resumed_at: float  # time when the new process had made progress
    redone: str = "nothing"  # a description of the lost work that the new process does again
    trajectories: int = 0  # number of trajectories that were lost and are generated again
    # number of the last restart in this recovery; the restarts of each role (such as the learner) are counted from 1
    attempt: int = 1
    # when each restart of this recovery happened; each restarted process except the last died before it made progress
    restarts: tuple[float, ...] = ()

    @property
    def seconds(self) -> float:
        """The seconds from the moment when the death of the process was noticed until the new process made progress."""
        return self.resumed_at - self.noticed_at

    def sentence(self) -> str:
        """Return a log line that describes the recovery."""
        return f"{self.role}: {self.reason}; back after {self.seconds:.1f} s; work done again: {self.redone}"


RECOVERY: TypeAdapter[Recovery] = TypeAdapter(Recovery)


def recovery_path(number: int) -> str:
    """Return the path at which recovery `number` is stored."""
    return f"recoveries/{number:08d}.json"


class RecoveryLog:
    """The stored recoveries of one run, oldest first."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._known: list[Recovery] = []
        self.damaged: list[str] = []  # paths of stored objects that cannot be parsed as a recovery
        self._unsure: int | None = None  # the number of the recovery that a failed `append` may have stored

    def append(self, recovery: Recovery) -> int:
        """Store a recovery, and return the recovery's number. If `append` fails, the call may be repeated, and the
        recovery is stored only once.
        """
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
        """Return all recoveries that can be read; only recoveries that were not read before are read from the store."""
        for number in range(self._read, first_missing(self.store, recovery_path, self._read)):
            path = recovery_path(number)
            try:
                self._known.append(RECOVERY.validate_json(self.store.get(path)))
            except (ValidationError, Corrupt):
                self.damaged.append(path)
        return list(self._known)


class Notes:
    """A queue of recoveries to store: the method `add` returns at once, and a background thread stores the
    recoveries."""

    def __init__(self, store: ObjectStore) -> None:
        self._recoveries = RecoveryLog(store)
        self._waiting: deque[Recovery] = deque()
        self._lock = threading.Lock()

    def add(self, recovery: Recovery) -> None:
        """Queue a recovery to be stored."""
        with self._lock:
            self._waiting.append(recovery)
            if len(self._waiting) == 1:  # a daemon thread cannot block the process's exit
                threading.Thread(target=self._store, name="recovery notes", daemon=True).start()

    def flush(self, seconds: float = 10.0) -> bool:
        """Wait up to `seconds` until all queued recoveries are stored; return whether all of them are stored."""
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
