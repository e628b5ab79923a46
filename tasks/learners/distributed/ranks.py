"""Ranks: processes that train one policy together, each on its part of every batch.

Each rank has the whole model and does the same steps on the same batch. Each rank runs its own lines; this module adds
up the results of all ranks. So gradients, losses and log-probs are those of the whole batch, however its lines are
dealt, and all ranks take the same optimizer step to the same bits.

    rank 0:  own lines --> gradient --+             +--> clip, AdamW
    rank 1:  own lines --> gradient --+--> sum -----+--> clip, AdamW
    rank 2:  (none)    --> nothing ---+             +--> clip, AdamW

- A rank without lines takes part in every sum, with zeros.
- A parameter without a gradient on all ranks has none after the sum, as with one rank: AdamW leaves it alone.
- Sums are in float32 or wider, and in a fixed order: the same number of ranks gives the same bits.
- Every sum has a time limit; one that fails raises `RankLost`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

Piece = TypeVar("Piece")
GROUP_SIGNS = "gloo", "connection", "timed out"  # in torch's message about a process group that failed


class RankLost(Exception):
    """Raised when a collective call fails: another rank ended or was late; `rank` names it where it is known."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class Ranks:
    """One rank, alone: nothing is added up or exchanged."""

    rank, count = 0, 1

    def select_own(self, pieces: list[Piece], length: Callable[[Piece], int]) -> list[Piece]:
        """Return the pieces that this rank runs; `length` returns a piece's tokens."""
        return pieces

    def add(self, found: Tensor) -> None:
        """Replace a tensor on the CPU by its sum over all ranks."""

    def add_gradients(self, parameters: Iterable[nn.Parameter], loss: float) -> float:
        """Replace the parameters' gradients by their sums over all ranks; return the sum of `loss`."""
        return loss

    def gather_all(self, found: np.ndarray) -> list[np.ndarray]:
        """Return the (N,) arrays of all ranks, without the empty ones."""
        return [found] if len(found) else []

    def check(self) -> None:
        """Raise `RankLost` if another rank is known to have ended. Callers ask before each micro-batch."""

    def take_metrics(self) -> dict[str, float]:
        """Return metrics since the last call."""
        return {}


@contextmanager
def raise_lost() -> Iterator[None]:
    """Raise torch's errors about a failed process group as `RankLost`."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.distributed.DistError) or any(sign in str(error).lower() for sign in GROUP_SIGNS):
            raise RankLost(str(error)) from error
        raise
