"""Encodes the changes of an array's elements in few bytes: which elements changed, and by how much.

An element is compared as an unsigned integer with the bits of the number, so the encoding is exact for every data type,
NaN included. A small change of a floating-point number is a small change of this integer. For example, if a bfloat16
number changes by the smallest possible amount, the integer changes by 1 or by -1.

    before  7 7 3 9 9 9 5        gaps   2 3      the number of unchanged elements before each changed element
    after   7 7 4 9 9 9 4        steps  1 -1     after - before, modulo 2^bits

- A gap is stored as bytes: 255 for each 255 unchanged elements, and then the rest.
- A step s is stored as 2 s, or as -2 s - 1 if s is negative, so that its high bytes are zero. The lowest bytes of all
  steps are one stream, the second bytes are the next stream, and so on. A stream of zeros is stored as no bytes.
- Each stream is compressed by zstd.

The sizes of all streams are checked before memory is allocated, so damaged streams raise `ValueError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.unsignedinteger]
Positions = NDArray[np.int64]

LEVEL = 3  # zstd's level of compression; higher levels are slower and save almost nothing here
RUN = 255  # number of unchanged elements that one byte of a long gap stands for
MOST_CHANGED = 0.4  # if a larger fraction of the elements has changed, no changes are encoded


@dataclass(frozen=True, slots=True)
class EncodedChanges:
    """The changed elements of an array as compressed streams: the gaps, and one stream for each byte of the steps."""

    changed: int  # number of changed elements
    gap_bytes: int  # number of bytes of the gaps before compression
    streams: tuple[bytes, ...]


def encode_changes(before: Numbers, after: Numbers) -> EncodedChanges | None:
    """Encode the changes that turn `before` into `after`; return None if too many elements have changed.

    Both arrays have N elements of the same unsigned type.
    """
    different = before != after
    changed = int(np.count_nonzero(different))
    if changed > MOST_CHANGED * len(before):
        return None
    if not changed:
        return EncodedChanges(0, 0, ())
    (where,) = np.nonzero(different)
    gaps = _gap_bytes(where)
    planes = _step_planes(after[where] - before[where])
    streams = (_compress(gaps), *(_compress(plane) if plane.any() else b"" for plane in planes))
    return EncodedChanges(changed, len(gaps), streams)


def decode_positions(found: EncodedChanges, count: int) -> Positions:
    """Return the positions of the changed elements of an array with `count` elements, in ascending order.

    Raises:
        ValueError: the streams are damaged.
    """
    if not found.changed:
        return np.empty(0, np.int64)
    if not 0 < found.changed <= count or not found.changed <= found.gap_bytes <= found.changed + count // RUN:
        raise ValueError("the delta is damaged: its number of changed elements or of gaps is impossible")
    gaps = _decompress(found.streams[0], found.gap_bytes)
    ends = gaps < RUN
    where = np.cumsum(gaps + ends, dtype=np.int64)[ends] - 1
    if len(where) != found.changed or where[-1] >= count:
        raise ValueError("the delta is damaged: its gaps do not fit its number of changed elements")
    return where


def decode_steps(found: EncodedChanges, width: int) -> Numbers:
    """Return the step of each changed element of `width` bytes, modulo 2^(8 width).

    Raises:
        ValueError: the streams are damaged.
    """
    planes = found.streams[1:]
    if len(planes) != width:
        raise ValueError(
            f"the delta is damaged: it has {len(planes)} streams of steps, but elements of {width} bytes need {width}"
        )
    folded = np.zeros((found.changed, width), np.uint8)
    for n, plane in enumerate(planes):
        if plane:
            folded[:, n] = _decompress(plane, found.changed)
    numbers: Numbers = folded.reshape(-1).view(unsigned_type(width))
    one = numbers.dtype.type(1)
    steps: Numbers = (numbers >> one) ^ (numbers & one) * numbers.dtype.type(np.iinfo(numbers.dtype).max)
    return steps


def unsigned_type(width: int) -> np.dtype[np.unsignedinteger]:
    """Return the little-endian unsigned type of `width` bytes."""
    return np.dtype(f"<u{width}")


def _gap_bytes(where: Positions) -> NDArray[np.uint8]:
    """Return the gaps before the changed elements as bytes."""
    runs, rest = np.divmod(np.diff(where, prepend=-1) - 1, RUN)
    found = np.full(len(where) + int(runs.sum()), RUN, np.uint8)
    found[np.cumsum(runs + 1) - 1] = rest
    return found


def _step_planes(steps: Numbers) -> Sequence[NDArray[np.uint8]]:
    """Return the bytes of the steps, from the lowest byte to the highest."""
    one, bits = steps.dtype.type(1), steps.dtype.type(8 * steps.itemsize - 1)
    # the sign moves to the lowest bit, and a negative number is inverted
    folded = (steps << one) ^ (steps >> bits) * steps.dtype.type(np.iinfo(steps.dtype).max)
    little = folded.astype(steps.dtype.newbyteorder("<"), copy=False)
    return [np.ascontiguousarray(plane) for plane in little.view(np.uint8).reshape(len(steps), -1).T]


def _compress(data: NDArray[np.uint8]) -> bytes:
    from pyarrow import Codec  # imported here, because most processes read no deltas

    return bytes(Codec("zstd", LEVEL).compress(data, asbytes=True))


def _decompress(data: bytes, size: int) -> NDArray[np.uint8]:
    """Return the `size` bytes of a compressed stream; raise `ValueError` if the stream is damaged."""
    from pyarrow import ArrowException, Codec

    try:
        found = Codec("zstd").decompress(data, size)
    except (ArrowException, OSError) as error:
        raise ValueError(f"the delta is damaged: a compressed stream cannot be read ({error})") from error
    if len(found) != size:
        raise ValueError(f"the delta is damaged: a compressed stream contains {len(found)} bytes instead of {size}")
    return np.frombuffer(found, np.uint8)
