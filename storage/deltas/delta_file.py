"""Defines the file format of a delta: the difference between a weight file and the previous (parent) version's file of
the same name.

    MAGIC | length of the header | header in JSON | streams of chunk 0 | streams of chunk 1 | ...

The header contains the sha256 of the parent's file and of the resulting file, and describes the chunks. A chunk is a
part of the file with elements of one size. The streams of a chunk are its changes (see `changes`), or its whole bytes
if too many elements have changed. A chunk without a change has no streams and no entry in the header.

The parent's file and the resulting file have the same size. If a delta would be larger than `MOST_SHARE` of the file,
no delta is made, and the file is stored whole. Besides the two files, encoding needs the memory of one chunk and of the
delta.

No part of a delta is executed. Reading bytes that are not a valid delta raises `ValueError`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from rollflow.storage.deltas.changes import (
    EncodedChanges,
    Numbers,
    Positions,
    decode_positions,
    decode_steps,
    encode_changes,
    unsigned_type,
)
from rollflow.storage.deltas.elements import divide_file

SUFFIX = ".delta"  # a delta is stored at the path of the weight file with this suffix
MAGIC = b"rollflow delta 1"
CHUNK_ELEMENTS = 1 << 20  # largest number of elements in a chunk, so that a chunk stays in the processor's cache
MOST_SHARE = 0.5  # largest size of a delta, as a fraction of the whole file
WHOLE = -1  # in the header, the number of changed elements of a chunk that is stored whole


@dataclass(frozen=True, slots=True)
class DeltaChunk:
    """A chunk with changes: the `count` elements of `width` bytes from byte `start` of the file on."""

    start: int
    count: int
    width: int
    changes: EncodedChanges | bytes  # bytes: the chunk is stored whole

    @property
    def end(self) -> int:
        """The byte after the chunk's last byte."""
        return self.start + self.count * self.width

    @property
    def is_whole(self) -> bool:
        """True if the chunk is stored whole."""
        return isinstance(self.changes, bytes)

    def positions(self) -> Positions:
        """Return the positions of the changed elements in the chunk, in ascending order."""
        if isinstance(self.changes, bytes):
            return np.arange(self.count, dtype=np.int64)
        return decode_positions(self.changes, self.count)

    def numbers(self) -> Numbers:
        """Return the steps of the changed elements, modulo 2^bits; of a chunk that is stored whole, the new
        elements.
        """
        if isinstance(self.changes, bytes):
            return np.frombuffer(self.changes, unsigned_type(self.width)).copy()  # an array that can be written
        return decode_steps(self.changes, self.width)

    def apply(self, target: memoryview) -> None:
        """Change the chunk's bytes in the parent's file `target` to the bytes of the resulting file."""
        if isinstance(self.changes, bytes):
            target[self.start : self.end] = self.changes
        elif self.changes.changed:
            # These functions are called first: an error in them would keep `elements` alive, and a file in use cannot
            # be closed.
            where, steps = self.positions(), self.numbers()
            elements = np.frombuffer(target, unsigned_type(self.width), self.count, self.start)
            elements[where] += steps


@dataclass(frozen=True, slots=True)
class WeightsDelta:
    """The difference between a weight file and the parent version's file."""

    parent: str  # sha256 of the parent's file
    result: str  # sha256 of the resulting file
    size: int  # bytes of the parent's file, and of the resulting file
    chunks: tuple[DeltaChunk, ...]

    def apply(self, target: memoryview) -> None:
        """Apply the delta in place: `target`, a writable buffer, contains the parent version's file before the call,
        and the new file after it.

        The caller compares the sha256 of the result with the log entry.

        Raises:
            ValueError: the delta is damaged, or belongs to a file of another size; `target` may be changed in part.
        """
        if len(target) != self.size:
            raise ValueError(
                f"the delta changes a file of {self.size} bytes, but the given file has {len(target)} bytes"
            )
        for chunk in self.chunks:
            chunk.apply(target)


def encode_delta(before: memoryview, parent: str, after: Sequence[memoryview]) -> tuple[WeightsDelta, bytes] | None:
    """Return the delta from `before` to `after`, and its bytes; return None if the file should be stored whole.

    The function changes the writable buffer `before` into `after`. If the function returns None, `before` may be
    changed in part.

    Args:
        before: the parent's file.
        parent: the sha256 of the parent's file.
        after: the resulting file as buffers to be joined.
    """
    if len(before) != sum(map(len, after)):
        return None
    sha256, chunks, room = hashlib.sha256(), list[DeltaChunk](), MOST_SHARE * len(before)
    for start, width, part in _cut(after):
        sha256.update(part)
        place = before[start : start + len(part)]
        old, new = (np.frombuffer(data, unsigned_type(width)) for data in (place, part))
        changes = encode_changes(old, new)
        if isinstance(changes, EncodedChanges) and not changes.changed:
            continue
        chunk = DeltaChunk(start, len(new), width, bytes(part) if changes is None else changes)
        place[:] = part
        chunks.append(chunk)
        room -= sum(map(len, _streams(chunk)))
        if room < 0:
            return None
    delta = WeightsDelta(parent, sha256.hexdigest(), len(before), tuple(chunks))
    data = _to_bytes(delta)
    return (delta, data) if len(data) <= MOST_SHARE * len(before) else None


def read_delta(data: memoryview) -> WeightsDelta:
    """Read a delta from its bytes.

    Raises:
        ValueError: the bytes are not those of a delta.
    """
    begin = len(MAGIC) + 8
    size = int.from_bytes(data[len(MAGIC) : begin], "little")
    if bytes(data[: len(MAGIC)]) != MAGIC or begin + size > len(data):
        raise ValueError("the object is not a delta, because it does not begin like one")
    try:
        header = json.loads(bytes(data[begin : begin + size]))
        parent, result, length, told = (header[key] for key in ("parent", "result", "size", "chunks"))
        chunks = tuple(_read_chunks(told, data[begin + size :]))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the header of the delta is invalid: {error!r}") from error
    if not (isinstance(parent, str) and isinstance(result, str) and isinstance(length, int)):
        raise ValueError("the header of the delta is invalid")
    ends = [0, *(chunk.end for chunk in chunks)]
    if any(chunk.start < end for chunk, end in zip(chunks, ends, strict=False)) or ends[-1] > length:
        raise ValueError(
            "the header of the delta is invalid: two of its chunks overlap, or one lies outside of the file"
        )
    return WeightsDelta(parent, result, length, chunks)


def _cut(after: Sequence[memoryview]) -> Iterator[tuple[int, int, memoryview]]:
    """Yield for each chunk of a file: the position of its first byte, the size of an element, and the chunk's bytes.

    A chunk does not cross the border of two buffers, because their bytes are not adjacent in memory.
    """
    head = next(iter(after), memoryview(b""))
    stretches, start = iter(divide_file(head, sum(map(len, after)))), 0
    stretch = next(stretches, None)
    for part in after:
        offset = 0
        while offset < len(part):
            while stretch is not None and stretch.end <= start:
                stretch = next(stretches, None)
            assert stretch is not None, "stretches cover the whole file"
            count = min(len(part) - offset, stretch.end - start, CHUNK_ELEMENTS * stretch.width)
            aligned = (start - stretch.start) % stretch.width == 0 and count % stretch.width == 0
            yield start, stretch.width if aligned else 1, part[offset : offset + count]
            start, offset = start + count, offset + count


def _streams(chunk: DeltaChunk) -> tuple[bytes, ...]:
    return (chunk.changes,) if isinstance(chunk.changes, bytes) else chunk.changes.streams


def _to_bytes(delta: WeightsDelta) -> bytes:
    told = [
        [chunk.start, chunk.count, chunk.width, *_counts(chunk), *map(len, _streams(chunk))] for chunk in delta.chunks
    ]
    described = {"parent": delta.parent, "result": delta.result, "size": delta.size, "chunks": told}
    header = json.dumps(described, separators=(",", ":")).encode()
    streams = (stream for chunk in delta.chunks for stream in _streams(chunk))
    return b"".join((MAGIC, len(header).to_bytes(8, "little"), header, *streams))


def _counts(chunk: DeltaChunk) -> tuple[int, int]:
    return (WHOLE, 0) if isinstance(chunk.changes, bytes) else (chunk.changes.changed, chunk.changes.gap_bytes)


def _read_chunks(told: Any, data: memoryview) -> Iterator[DeltaChunk]:
    """Yield the chunks that the header `told` describes; raise `ValueError` if the streams do not fill `data`."""
    position = 0
    for numbers in told:
        if not all(isinstance(number, int) and number >= WHOLE for number in numbers) or len(numbers) < 6:
            raise ValueError(
                "the header of the delta is invalid: a chunk has too few numbers, or numbers that are not sizes"
            )
        start, count, width, changed, gap_bytes, *lengths = numbers
        if width not in (1, 2, 4, 8) or count < 1 or min(start, *lengths) < 0 or position + sum(lengths) > len(data):
            raise ValueError("the header of the delta is invalid: a chunk has an impossible position or size")
        bounds = pairwise(accumulate(lengths, initial=position))
        streams = tuple(bytes(data[first:last]) for first, last in bounds)
        position += sum(lengths)
        if changed == WHOLE and len(streams) == 1 and len(streams[0]) == count * width:
            yield DeltaChunk(start, count, width, streams[0])
        elif changed > 0 and len(streams) == 1 + width:
            yield DeltaChunk(start, count, width, EncodedChanges(changed, gap_bytes, streams))
        else:
            raise ValueError("the header of the delta is invalid: the streams of a chunk do not fit its size")
    if position != len(data):
        raise ValueError("the delta is longer or shorter than its header says")
