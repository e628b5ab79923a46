"""The protocol between the first rank of a learner and its other ranks: how they connect, which commands they get, and
how they end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol, TypeAlias

from rollflow.storage.objects.base import ObjectStore
from rollflow.tasks.objectives.prefixes.lines import Sharing


@dataclass(frozen=True, slots=True)
class Meeting:
    """The address of the TCP store through which the ranks of a learner find each other. The TCP store runs on the
    first rank."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class LoadState:
    """A command to load weights and state. `weights` and `state` map the name of each file to its size in bytes. The
    first rank sends the contents of the files after the command.

    `sharing` says how rows (trajectories) share leading tokens, or is None if they share none. All ranks use the first
    rank's `sharing`, because every rank must pack the batch into the same lines (packed sequences).
    """

    weights: Mapping[str, int]
    state: Mapping[str, int]
    sharing: Sharing | None


@dataclass(frozen=True, slots=True)
class TrainStep:
    """A command to train policy version `version` on a batch of `size` bytes. The first rank sends the batch after the
    command."""

    version: int
    size: int


@dataclass(frozen=True, slots=True)
class ComputeLogprobs:
    """A command to compute the log-probabilities of `tokens` together with the first rank."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FindNonfinite:
    """A command to search the rank's shards for a NaN or an infinity."""


@dataclass(frozen=True, slots=True)
class ShardModel:
    """A command to replace the tensors of a rank's model by the shards of this rank."""


@dataclass(frozen=True, slots=True)
class TryModel:
    """A command to take part in the first forward pass of a loaded model."""


Order: TypeAlias = ComputeLogprobs | FindNonfinite | LoadState | ShardModel | TrainStep | TryModel


@dataclass(frozen=True, slots=True)
class Place:
    """The object store and path at which a rank stores a file; `number` identifies the rank's report about the file."""

    store: ObjectStore
    path: str
    number: int


@dataclass(frozen=True, slots=True)
class SendFile:
    """A request to send this rank's shards of a file to rank `to`, after this rank has executed `after` commands.

    If `to` is not the first rank, rank `to` stores the gathered file at `place`.
    """

    file: str
    to: int = 0
    place: Place | None = None
    after: int = 0


@dataclass(frozen=True, slots=True)
class Pipes:
    """The two pipes from the first rank to another rank: `orders` carries commands, and `asked` carries requests for
    files."""

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
        """The pipes to the rank, which exist once the rank has started."""

    def read_exit(self) -> int | str | None:
        """Return the exit code of the rank, or a text that says how the rank ended; return None while the rank runs."""

    def end(self) -> None:
        """Kill the rank's process without waiting for its end."""


StartRank = Callable[[int, Meeting], StartedRank]


@dataclass(frozen=True, slots=True)
class RankHosts:
    """The hosts of the ranks: `host` is the address of the first rank, and the function `start` starts another rank.

    If `start` is None, all ranks are processes on one machine.
    """

    host: str = "127.0.0.1"
    start: StartRank | None = None


NEAR = RankHosts()
