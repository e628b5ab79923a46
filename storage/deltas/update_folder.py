"""Keeps deltas in a folder of weights, so that an engine can load only the elements that changed.

    model.safetensors                             the weight file of version 11
    deltas/00000010/model.safetensors.delta       the deltas that led to this file
    deltas/00000011/model.safetensors.delta

An engine with version 9 or 10 needs to load only the changed elements. The deltas say which elements changed. The new
values are read from the weight file, whose sha256 was checked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollflow.storage.deltas.changes import Numbers, Positions, unsigned_type
from rollflow.storage.deltas.delta_file import DeltaChunk, read_delta
from rollflow.storage.deltas.elements import TensorPlace, list_tensors
from rollflow.storage.objects.disk import map_file
from rollflow.storage.records import DELTA

FOLDER = "deltas"


@dataclass(frozen=True, slots=True)
class ChangedTensor:
    """The changed elements of a tensor: their positions in the flattened tensor, and the bits of their new values."""

    name: str
    dtype: str  # name of the data type in the safetensors file, for example "BF16"
    positions: Positions
    values: Numbers


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
        ValueError: a file in the folder is damaged.
    """
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    paths = {file: [_path(folder, version, file) for version in range(before + 1, after + 1)] for file in files}
    if not files or not 0 <= before < after or not all(path.exists() for several in paths.values() for path in several):
        return None
    return (changed for file in files for changed in _read_changes(folder / file, paths[file]))


def _read_changes(file: Path, deltas: list[Path]) -> Iterator[ChangedTensor]:
    data = map_file(file)
    places = list_tensors(data)
    for path in deltas:
        for chunk in read_delta(map_file(path)).chunks:
            yield from _split(chunk, places, data)


def _split(chunk: DeltaChunk, places: list[TensorPlace], data: memoryview) -> Iterator[ChangedTensor]:
    """Divide the changed elements of a chunk among the tensors."""
    where = chunk.start + chunk.positions() * chunk.width
    for place in places:
        if place.end <= chunk.start or chunk.end <= place.start:
            continue
        inside = where[np.searchsorted(where, place.start) : np.searchsorted(where, place.end)]
        if len(inside):
            positions = (inside - place.start) // place.width
            elements = np.frombuffer(
                data, unsigned_type(place.width), (place.end - place.start) // place.width, place.start
            )
            yield ChangedTensor(place.name, place.dtype, positions, elements[positions])


def _path(folder: Path, version: int, file: str) -> Path:
    return folder / FOLDER / f"{version:08d}" / f"{file}{DELTA}"
