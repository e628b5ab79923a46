"""What the first rank knows of the other ranks: where they meet, which orders they take, and how they end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol, TypeAlias

from rollflow.storage.objects.base import ObjectStore


@dataclass(frozen=True, slots=True)
class Meeting:
    """The address of the TCP store, which the first rank owns."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class LoadState:
    """Load weights and state; each maps a file name to its size in bytes. The contents follow.

    `width` is the result of the first rank's test of the model: all ranks must pack a batch into the same lines.
    """

    weights: Mapping[str, int]
    state: Mapping[str, int]
    width: int | None


@dataclass(frozen=True, slots=True)
class TrainStep:
    """Train `version` on a batch of `size` bytes, which follow."""

    version: int
    size: int


@dataclass(frozen=True, slots=True)
class ComputeLogprobs:
    """Compute the log-probabilities of `tokens` together with the first rank."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FindNonfinite:
    """Search the rank's shards for a weight that is not finite."""


@dataclass(frozen=True, slots=True)
class ShardModel:
    """Replace the model's tensors by the rank's shards."""


@dataclass(frozen=True, slots=True)
class TryModel:
    """Take part in the first forward pass of a loaded model."""


Order: TypeAlias = ComputeLogprobs | FindNonfinite | LoadState | ShardModel | TrainStep | TryModel


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stores a file; `number` identifies its answer."""

    store: ObjectStore
    path: str
    number: int


@dataclass(frozen=True, slots=True)
class SendFile:
    """Send your shards of a stored file to rank `to`, as they are after `after` executed orders.

    A rank `to` other than the first one stores the file at `place`.
    """

    file: str
    to: int = 0
    place: Place | None = None
    after: int = 0


@dataclass(frozen=True, slots=True)
class Pipes:
    """The two pipes to a rank: its orders, and requests for files beside them."""

    orders: Connection
    asked: Connection

    def close(self) -> None:
        """Close both pipes."""
        self.orders.close()
        self.asked.close()


class StartedRank(Protocol):
    """A rank's process."""

    @property
    def pipes(self) -> Pipes:
        """The pipes to the rank; available once it has started."""

    def read_exit(self) -> int | str | None:
        """Return the exit code, or a text that says how the rank ended; None while it lives."""

    def end(self) -> None:
        """Kill the rank without waiting for its end."""


StartRank = Callable[[int, Meeting], StartedRank]


@dataclass(frozen=True, slots=True)
class RankHosts:
    """Where a learner's ranks run: this machine's address for the others, and the function that starts a rank.

    Without `start` the ranks are processes of this machine.
    """

    host: str = "127.0.0.1"
    start: StartRank | None = None


NEAR = RankHosts()
