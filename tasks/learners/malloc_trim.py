"""Release of freed memory, because the C library would keep a step's memory while the version is published."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

MANY = 2**28  # bytes of weights from which on memory is released; releasing less memory is not worth the time


def release_memory(weights: Iterable[Tensor]) -> None:
    """Release freed memory to the system if `weights` are large. The release costs the next step some page faults."""
    if sum(tensor.nbytes for tensor in weights if tensor.device.type == "cpu") >= MANY:
        give_back_all()


def give_back_all() -> None:
    """Release freed memory to the system, whatever the size of the weights."""
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> Any:
    """Return glibc's `malloc_trim`; None with another C library."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def given_back(shape: torch.Size, kind: torch.dtype) -> Tensor:
    """Return a new tensor whose memory goes back to the system as soon as the tensor is freed.

    The C library would keep much of the memory that it allocates for a tensor.
    """
    if not shape.numel():
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(mmap.mmap(-1, shape.numel() * kind.itemsize), dtype=kind).view(shape)
