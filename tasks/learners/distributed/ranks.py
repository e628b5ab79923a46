"""A rank is one of the processes that train a policy together, each on its share of every batch.

Each rank has a copy of the whole model and takes the same optimizer steps, so all ranks have bit-identical weights.
Each rank runs its own packed sequences of the batch, and the results of all ranks are added up. Gradients, losses and
log-probs do not depend on how the batch is divided among ranks.

    rank 0:  own lines --> gradient --+             +--> clip, AdamW
    rank 1:  own lines --> gradient --+--> sum -----+--> clip, AdamW
    rank 2:  (none)    --> nothing ---+             +--> clip, AdamW

- A rank without a packed sequence adds zeros to every sum over the ranks.
- A parameter without a gradient on any rank has no gradient after the sum, so AdamW does not change it.
- Sums over ranks are computed in a fixed order, so that the same number of ranks gives the same bits.
- Every sum over ranks has a time limit; a sum that fails raises `RankLost`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

Piece = TypeVar("Piece")
# words that occur in torch's errors about a failed process group
GROUP_SIGNS = "gloo", "connection", "timed out"


class RankLost(Exception):
    """Raised when a collective call fails because another rank ended or was late. `rank` is the number of the rank that
    ended or was late, if known."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class Ranks:
    """The interface of the ranks of a learner, implemented for a single rank, which has nothing to add up."""

    rank, count = 0, 1

    def select_own(self, pieces: list[Piece], length: Callable[[Piece], int]) -> list[Piece]:
        """Return the pieces of work that this rank runs; `length` maps a piece to its number of tokens."""
        return pieces

    def add(self, found: Tensor) -> None:
        """Replace a tensor on the CPU by its sum over all ranks."""

    def add_gradients(self, parameters: Iterable[nn.Parameter], loss: float) -> float:
        """Replace the gradients of the parameters by their sums over all ranks; return the sum of `loss` over all
        ranks."""
        return loss

    def gather_all(self, found: np.ndarray) -> list[np.ndarray]:
        """Return the flat arrays that all ranks passed, except empty arrays."""
        return [found] if len(found) else []

    def check(self) -> None:
        """Raise `RankLost` if another rank is known to have ended. The learner calls `check` before each
        micro-batch."""

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of this rank since the previous call of `take_metrics`."""
        return {}


@contextmanager
def raise_lost() -> Iterator[None]:
    """Replace torch's errors about a failed process group by the error `RankLost`."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.distributed.DistError) or any(sign in str(error).lower() for sign in GROUP_SIGNS):
            raise RankLost(str(error)) from error
        raise
