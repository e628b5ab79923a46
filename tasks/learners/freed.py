"""Memory that a step has freed: the C library keeps it for the next one, beside what is published meanwhile."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import Tensor

MANY = 2**28  # bytes of weights: with fewer, to take memory again costs more time than it is worth


def give_back(weights: Iterable[Tensor]) -> None:
    """Give it back to the system, where the `weights` are many. Costs the next step some page faults."""
    if sum(tensor.nbytes for tensor in weights) >= MANY and (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> Any:
    """glibc's `malloc_trim`; None with another C library."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
