"""Stores the reasons why episodes could not continue from their stored turns after a crash, as objects
`episode_restarts/<claim>-<n>.json`. Turns that could not be restored are generated again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter, ValidationError

from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.objects.base import ObjectStore

FOLDER = "episode_restarts"


@dataclass(frozen=True, slots=True)
class EpisodeRestart:
    """An episode that could not be restored in full: the number of the first turn that the policy generated again, and
    the reason.
    """

    prompt: int
    attempt: int
    sample: int
    turn: int
    reason: str

    def sentence(self) -> str:
        """Return a line that describes the restart."""
        return f"{self.prompt}.{self.attempt}.{self.sample}: generated anew from turn {self.turn}: {self.reason}"


_RESTARTS: TypeAdapter[list[EpisodeRestart]] = TypeAdapter(list[EpisodeRestart])


def store_restarts(run: ObjectStore, claim: int, number: int, restarts: Sequence[EpisodeRestart]) -> None:
    """Store records of restarts as object `number` of the scheduler that claimed its role by log entry `claim`."""
    run.put(f"{FOLDER}/{claim:010d}-{number:010d}.json", json.dumps([asdict(one) for one in restarts]).encode())


def read_restarts(run: ObjectStore) -> list[EpisodeRestart]:
    """Return all stored restarts that can be read, oldest first."""
    found = list[EpisodeRestart]()
    for path in sorted(run.list(FOLDER)):
        try:
            found += _RESTARTS.validate_json(run.get(path))
        except (Corrupt, Missing, ValidationError):
            continue
    return found
