"""Returns freed memory to the operating system, because the C library would keep it while weights are published."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

MANY = 2**28  # smallest size of the weights, in bytes, for which returning freed memory is worth the time


def release_memory(weights: Iterable[Tensor]) -> None:
    """Return freed memory to the operating system if the model's weights are large. After memory was returned, the next
    train step has some additional page faults."""
    if sum(tensor.nbytes for tensor in weights if tensor.device.type == "cpu") >= MANY:
        give_back_all()


def give_back_all() -> None:
    """Return freed memory to the operating system, whatever the size of the weights."""
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> Any:
    """Return the function `malloc_trim` of glibc; None if another C library is used."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def given_back(shape: torch.Size, kind: torch.dtype) -> Tensor:
    """Return a new tensor whose memory goes back to the operating system as soon as the tensor is freed.

    The C library would keep much of the memory of an ordinary tensor.
    """
    if not shape.numel():
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(mmap.mmap(-1, shape.numel() * kind.itemsize), dtype=kind).view(shape)
