"""Memory that a step has freed: the C library keeps it for the next one, beside what is published meanwhile."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

MANY = 2**28  # bytes of weights: with fewer, to take memory again costs more time than it is worth


def give_back(weights: Iterable[Tensor]) -> None:
    """Give it back to the system, where the processor has many `weights`. Costs the next step some page faults."""
    if sum(tensor.nbytes for tensor in weights if tensor.device.type == "cpu") >= MANY:
        give_back_all()


def give_back_all() -> None:
    """As `give_back`, whatever it costs."""
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> Any:
    """glibc's `malloc_trim`; None with another C library."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def given_back(shape: torch.Size, kind: torch.dtype) -> Tensor:
    """A tensor whose memory goes back to the system with it; the C library keeps much of what it gave itself."""
    if not shape.numel():
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(mmap.mmap(-1, shape.numel() * kind.itemsize), dtype=kind).view(shape)
