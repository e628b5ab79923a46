"""Ranks: processes that train one policy together, each on its part of every batch.

Each has the whole model, and does the same steps on the same batch. What they do together, they do here: each runs its
own lines, and what these give is added up over all of them. So gradients, losses and log-probs are those of the whole
batch, whoever has how much of it, and all ranks take the same optimizer step to the same bits.

    rank 0:  own lines --> gradient --+             +--> clip, AdamW
    rank 1:  own lines --> gradient --+--> sum -----+--> clip, AdamW
    rank 2:  (none)    --> nothing ---+             +--> clip, AdamW

- A rank without lines takes part in every sum, with zeros.
- A parameter that has a gradient on no rank has none after it, as with one rank: AdamW leaves it alone.
- Sums are in float32 or wider, and in a fixed order: the same ranks give the same bits.
- Every one is bounded in time; one that fails raises `Lost`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

Piece = TypeVar("Piece")
GROUP_SIGNS = "gloo", "connection", "timed out"  # in what torch says of a group that failed


class Lost(Exception):
    """What ranks do together failed: another one ended, or was not there in time; `rank`, where it is known."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class Ranks:
    """One rank, alone: nothing is shared, and nothing is changed."""

    rank, count = 0, 1

    def own(self, pieces: list[Piece], length: Callable[[Piece], int]) -> list[Piece]:
        """Those that this rank runs; `length` in tokens."""
        return pieces

    def add(self, found: Tensor) -> None:
        """Put the sum over all ranks in its place; a tensor on the CPU."""

    def add_gradients(self, parameters: Iterable[nn.Parameter], loss: float) -> float:
        """Put the sums over all ranks in the place of the parameters' gradients; returns that of the loss."""
        return loss

    def gathered(self, found: np.ndarray) -> list[np.ndarray]:
        """(N,) numbers of every rank, where it has any."""
        return [found] if len(found) else []

    def check(self) -> None:
        """Before a micro-batch: raises `Lost` if another rank is known to have ended."""

    def told(self) -> dict[str, float]:
        """Metrics since they were asked for last."""
        return {}


@contextmanager
def lost() -> Iterator[None]:
    """What torch says of a group that failed becomes `Lost`."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.distributed.DistError) or any(sign in str(error).lower() for sign in GROUP_SIGNS):
            raise Lost(str(error)) from error
        raise
