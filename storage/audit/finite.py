"""Searches a safetensors file, in chunks, for a weight that is NaN or infinite. A floating-point number is NaN or
infinite if all bits of its exponent are 1.

File format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator

import numpy as np

STRETCH = 1 << 20  # number of weights of a tensor that are checked at a time
EXPONENTS = {  # maps a data type to the unsigned NumPy type of the same width and the mask of the exponent's bits
    "F64": ("<u8", 0x7FF << 52),
    "F32": ("<u4", 0xFF << 23),
    "BF16": ("<u2", 0xFF << 7),
    "F16": ("<u2", 0x1F << 10),
}


def first_nonfinite(data: bytes | memoryview | mmap.mmap) -> str | None:
    """Return the name of the first tensor that contains NaN or infinity; return None if all numbers are finite.

    Raises:
        ValueError: the file is not a safetensors file.
    """
    for name, dtype, start, end in _tensors(data):
        if dtype in EXPONENTS and not _is_finite(data, dtype, start, end):
            return name
    return None


def _tensors(data: bytes | memoryview | mmap.mmap) -> Iterator[tuple[str, str, int, int]]:
    """Yield the name, the data type, the first byte and the end byte of each tensor in a safetensors file."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise ValueError("the header of the safetensors file is truncated")
    try:
        header = json.loads(bytes(data[8 : 8 + size]))
        for name, tensor in header.items():
            if name != "__metadata__":
                start, end = tensor["data_offsets"]
                if not 0 <= start <= end <= len(data) - 8 - size:
                    raise ValueError(f"tensor {name} lies outside of the safetensors file")
                yield name, str(tensor["dtype"]), 8 + size + start, 8 + size + end
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the header of the safetensors file is invalid: {error!r}") from error


def _is_finite(data: bytes | memoryview | mmap.mmap, dtype: str, start: int, end: int) -> bool:
    kind, exponent = EXPONENTS[dtype]
    width = np.dtype(kind).itemsize
    for first in range(start, end - width + 1, STRETCH * width):
        count = min(STRETCH, (end - first) // width)
        bits = np.frombuffer(data, kind, count, first)
        if ((bits & bits.dtype.type(exponent)) == exponent).any():
            return False
    return True
