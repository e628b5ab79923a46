"""What died and was brought back: one object for each recovery of a run, `recoveries/<n>.json`.

Any process may append: a number is taken by an atomic create, and who loses it takes the next one. The log is for
people, the summary and MLflow; nothing that decides reads it back.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rollflow.storage.errors import Conflict, Corrupt
from rollflow.storage.objects.base import ObjectStore, first_missing


@dataclass(frozen=True, slots=True)
class Recovery:
    """One recovery. Times are seconds since the epoch, by the clock of the process that recovered it."""

    role: str  # "learner", "engine-0", "rollout stage", "supervisor", ...
    reason: str  # what was seen of its end
    noticed_at: float
    restored_at: float  # its successor was up
    resumed_at: float  # its successor had made progress
    redone: str = "nothing"  # work that is done again
    trajectories: int = 0  # of it: trajectories that are generated again
    attempt: int = 1  # the how-manieth restart of this role

    @property
    def seconds(self) -> float:
        """From the moment the end was noticed until there was progress again."""
        return self.resumed_at - self.noticed_at

    def sentence(self) -> str:
        """For a log line."""
        return f"{self.role}: {self.reason}; back after {self.seconds:.1f} s; done again: {self.redone}"


def recovery_path(number: int) -> str:
    """Where recovery `number` lies."""
    return f"recoveries/{number:08d}.json"


class RecoveryLog:
    """The recoveries of one run, oldest first."""

    def __init__(self, run: ObjectStore) -> None:
        self.run = run
        self._known: list[Recovery] = []

    def append(self, recovery: Recovery) -> int:
        """Write a recovery down; returns its number."""
        data = json.dumps(asdict(recovery)).encode()
        number = first_missing(self.run, recovery_path, len(self._known))
        while True:
            try:
                self.run.create(recovery_path(number), data)
                return number
            except Conflict:
                number += 1

    def read(self) -> list[Recovery]:
        """All recoveries; asks the store only for the ones it has not seen."""
        for number in range(len(self._known), first_missing(self.run, recovery_path, len(self._known))):
            path = recovery_path(number)
            try:
                self._known.append(Recovery(**json.loads(self.run.get(path))))
            except (ValueError, TypeError) as error:
                raise Corrupt(f"{path} is not a recovery: {error}") from error
        return list(self._known)
