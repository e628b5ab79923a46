"""Divides a safetensors file into stretches of elements of the same size.

A safetensors file consists of eight bytes with the length of the header, the header in JSON, and the tensors. In a
stretch, elements of the same size follow each other without a gap, across the borders of tensors. A stretch never cuts
an element, so a small change of a number is a small change of an integer. Every byte of the file is in one stretch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

WIDTHS: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
}  # bytes of an element by data type; elements of other types are compared byte by byte


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The position of a tensor in a safetensors file."""

    name: str
    start: int  # position of the tensor's first byte, counted from the beginning of the file
    end: int  # position of the byte after the tensor's last byte
    width: int  # number of bytes of an element
    dtype: str  # name of the data type, for example "BF16"


@dataclass(frozen=True, slots=True)
class Stretch:
    """The bytes from `start` to `end` of a file, which consist of elements of `width` bytes each."""

    start: int
    end: int
    width: int


def list_tensors(data: memoryview) -> list[TensorPlace]:
    """Return the positions of all tensors of a safetensors file, sorted by position; `data` may end after the header.

    Raises:
        ValueError: the file is not a safetensors file.
    """
    size = int.from_bytes(data[:8], "little")
    if size > len(data) - 8:
        raise ValueError("the header of the safetensors file is truncated")
    places = []
    try:
        for name, tensor in json.loads(bytes(data[8 : 8 + size])).items():
            if name != "__metadata__":
                start, end = tensor["data_offsets"]
                dtype = str(tensor["dtype"])
                start, end = 8 + size + int(start), 8 + size + int(end)
                places.append(TensorPlace(name, start, end, WIDTHS.get(dtype, 1), dtype))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the header of the safetensors file is invalid: {error!r}") from error
    return sorted(places, key=lambda place: place.start)


def divide_file(data: memoryview, size: int) -> list[Stretch]:
    """Divide a file of `size` bytes into stretches. A file that is not a safetensors file is one stretch of bytes."""
    try:
        return list(_join(_cover(list_tensors(data), size)))
    except ValueError:
        return [Stretch(0, size, 1)]


def _cover(places: list[TensorPlace], size: int) -> Iterator[Stretch]:
    """Yield stretches that cover all bytes of a file: its tensors, and the bytes between the tensors."""
    end = 0
    for place in places:
        if not end <= place.start <= place.end <= size:
            raise ValueError(f"tensor {place.name} overlaps another tensor, or lies outside of the safetensors file")
        yield Stretch(end, place.start, 1)
        whole = (place.end - place.start) % place.width == 0
        yield Stretch(place.start, place.end, place.width if whole else 1)
        end = place.end
    yield Stretch(end, size, 1)


def _join(stretches: Iterator[Stretch]) -> Iterator[Stretch]:
    """Join adjacent stretches with elements of the same size; leave out empty stretches."""
    open_stretch: Stretch | None = None
    for stretch in stretches:
        if stretch.start == stretch.end:
            continue
        if open_stretch is not None and open_stretch.width == stretch.width:
            open_stretch = Stretch(open_stretch.start, stretch.end, stretch.width)
            continue
        if open_stretch is not None:
            yield open_stretch
        open_stretch = stretch
    if open_stretch is not None:
        yield open_stretch
