"""What the first rank of a learner has of the others: where they meet, what it tells them, and how they end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from rollflow.storage.objects.base import ObjectStore


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the first rank has the store of all."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Load:
    """Become what these files say; by name, their sizes in bytes. Their contents follow.

    `width` is what the first rank found when it tried the model: all have to make the same lines of a batch.
    """

    weights: Mapping[str, int]
    state: Mapping[str, int]
    width: int | None


@dataclass(frozen=True, slots=True)
class Step:
    """Train `version` on a batch of so many bytes, which follow."""

    version: int
    size: int


@dataclass(frozen=True, slots=True)
class Call:
    """Do your part of what a method of the learner does."""

    name: str
    given: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stores a file; `number` is what it answers under."""

    store: ObjectStore
    path: str
    number: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Give rank `to` your parts of a file that is stored, as they are once `after` orders have been obeyed.

    Another rank than the first one stores it at `place`.
    """

    file: str
    to: int = 0
    place: Place | None = None
    after: int = 0


@dataclass(frozen=True, slots=True)
class Pipes:
    """Where a rank is told: what to do, and what to give beside it."""

    orders: Connection
    asked: Connection

    def close(self) -> None:
        """Both."""
        self.orders.close()
        self.asked.close()


class StartedRank(Protocol):
    """A rank's process."""

    @property
    def pipes(self) -> Pipes:
        """Where it is told; once it was there."""

    def ended(self) -> int | str | None:
        """Its exit code, or what else is known of its end; None while it lives."""

    def end(self) -> None:
        """Kill it, and wait for nothing."""


StartRank = Callable[[int, Meeting], StartedRank]


@dataclass(frozen=True, slots=True)
class RankHosts:
    """Where a learner's ranks are: the address of this machine that the others reach, and what starts each of them.

    Without `start` they are processes of this machine.
    """

    host: str = "127.0.0.1"
    start: StartRank | None = None


NEAR = RankHosts()
