"""Keeps deltas in a folder of weights, so that an engine can load only the elements that changed.

    model.safetensors                             the weight file of version 11
    deltas/00000010/model.safetensors.delta       the deltas that led to this file
    deltas/00000011/model.safetensors.delta

An engine with version 9 or 10 needs to change only the changed elements. The sha256 of each delta was checked. The
weight file itself is not read, because the changed elements lie on nearly every page of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollflow.storage.deltas.changes import Numbers, Positions
from rollflow.storage.deltas.delta_file import DeltaChunk, read_delta
from rollflow.storage.deltas.elements import TensorPlace, list_tensors
from rollflow.storage.objects.disk import map_file
from rollflow.storage.records import DELTA

FOLDER = "deltas"


@dataclass(frozen=True, slots=True)
class ChangedTensor:
    """The changed elements of a tensor: their positions in the flattened tensor, and what happens to their bits.

    The bits of an element are an unsigned integer, to which a number is added, modulo 2^bits (see `changes`). If the
    numbers have one byte although the tensor's elements have more, the positions are those of bytes.
    """

    name: str
    dtype: str  # name of the data type in the safetensors file, for example "BF16"
    positions: Positions
    numbers: Numbers
    replaces: bool  # True if the numbers are the new bits, and nothing is added


def keep_delta(folder: Path, version: int, file: str, data: memoryview) -> None:
    """Write the delta by which policy version `version` changed the weight file `file` to a folder of weights."""
    path = _path(folder, version, file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # the existing file may be linked in another folder, which must not change
    path.write_bytes(data)


def link_deltas(source: Path, folder: Path, file: str) -> None:
    """Link the deltas of the weight file `file` from the folder `source` to another folder of weights; no data is
    copied.
    """
    for delta in (source / FOLDER).glob(f"*/{file}{DELTA}"):
        target = folder / FOLDER / delta.parent.name / delta.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            os.link(delta, target)


def list_changes(folder: Path, before: int, after: int) -> Iterator[ChangedTensor] | None:
    """Return the elements of all weight files that changed from policy version `before` to version `after`; return None
    if the folder of version `after` does not say which elements changed.

    A tensor occurs several times if several deltas change it.

    Raises:
        ValueError: a file in the folder is damaged, or a delta does not fit the delta before it or the weight file.
    """
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    paths = {file: [_path(folder, version, file) for version in range(before + 1, after + 1)] for file in files}
    if not files or not 0 <= before < after or not all(path.exists() for several in paths.values() for path in several):
        return None
    return (changed for file in files for changed in _read_changes(folder / file, paths[file]))


def _read_changes(file: Path, deltas: list[Path]) -> Iterator[ChangedTensor]:
    data, parent = map_file(file), ""
    places = list_tensors(data)
    for path in deltas:
        delta = read_delta(map_file(path))
        if delta.size != len(data) or (parent and delta.parent != parent):
            raise ValueError(f"the delta {path} does not fit the delta before it, or the weight file {file.name}")
        parent = delta.result
        for chunk in delta.chunks:
            yield from _split(chunk, places)


def _split(chunk: DeltaChunk, places: list[TensorPlace]) -> Iterator[ChangedTensor]:
    """Divide the changed elements of a chunk among the tensors."""
    where, numbers = chunk.positions(), chunk.numbers()
    for place in places:
        if place.end <= chunk.start or chunk.end <= place.start:
            continue
        begin, rest = divmod(place.start - chunk.start, chunk.width)  # negative if the tensor begins before the chunk
        if rest:
            raise ValueError(f"a chunk of the delta begins in the middle of an element of the tensor {place.name}")
        first, last = np.searchsorted(where, (begin, (place.end - chunk.start) // chunk.width))
        if first < last:
            inside = slice(first, last)
            yield ChangedTensor(place.name, place.dtype, where[inside] - begin, numbers[inside], chunk.is_whole)


def _path(folder: Path, version: int, file: str) -> Path:
    return folder / FOLDER / f"{version:08d}" / f"{file}{DELTA}"
