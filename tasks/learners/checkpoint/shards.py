"""Writes and reads safetensors files. In memory, a file consists of a header and views of the tensors, so that
publishing weights copies no tensor.

A file has at most `shard_bytes` bytes of tensors, but a larger tensor gets a file of its own. Files have the names that
Hugging Face uses: `model.safetensors`, or `model-00001-of-00003.safetensors` with the index
`model.safetensors.index.json`. Because files are views of tensors, they are valid only until a tensor changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollflow.storage.errors import Corrupt
from rollflow.storage.objects.base import Data, split_buffers

Files = Iterable[tuple[str, Data]]  # name and content of each file; may be an iterator that can be read only once
Named = Iterable[tuple[str, Tensor]]  # name and value of each tensor; may be an iterator that can be read only once

INDEX = ".index.json"
SHARD_BYTES = 2**28
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
NAMES = {name: dtype for dtype, name in TYPES.items()}


def to_files(stem: str, tensors: Mapping[str, Tensor], shard_bytes: int = SHARD_BYTES) -> dict[str, Data]:
    """Build safetensors files; return a mapping of file names to contents. File names begin with the prefix `stem`,
    such as "weights/model"."""
    shards = plan_files(stem, tensors, shard_bytes)
    return {**{name: file_of(shard) for name, shard in shards.items()}, **index_of(stem, shards)}


def plan_files(stem: str, tensors: Mapping[str, Tensor], shard_bytes: int) -> dict[str, dict[str, Tensor]]:
    """Divide tensors among files, without reading their values; return the tensors of each file, by file name."""
    shards = _split(tensors, shard_bytes)
    count = len(shards)
    if count == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {f"{stem}-{n:05d}-of-{count:05d}.safetensors": shard for n, shard in enumerate(shards, 1)}


def index_of(stem: str, shards: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Data]:
    """Return the index file, which maps each tensor's name to the tensor's file; return an empty mapping if there is
    only one file.
    """
    if len(shards) == 1:
        return {}
    where = {name: file.rpartition("/")[2] for file, shard in shards.items() for name in shard}
    total = sum(tensor.nbytes for shard in shards.values() for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    return {f"{stem}.safetensors{INDEX}": json.dumps(index, indent=2).encode()}


def from_files(files: Mapping[str, Data]) -> dict[str, Tensor]:
    """Return all tensors of safetensors files by name."""
    return dict(tensors_of(files.items()))


def tensors_of(files: Files) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of safetensors files by name; raise `Corrupt` if a file is not a safetensors file.

    If the content of a file is one writable buffer, the file's tensors are views of the buffer; otherwise they are
    copies.
    """
    for file, data in files:
        if not file.endswith(INDEX):
            yield from _tensors(file, _join_data(data))
        del data  # free the file's memory before the next file is read


def shapes_of(files: Files) -> dict[str, Tensor]:
    """Return the tensors of safetensors files by name, with shapes and types but without values (on torch's "meta"
    device).

    Raises:
        Corrupt: a file is not a safetensors file.
    """
    return {name: tensor.to("meta") for name, tensor in tensors_of(files)}


def _split(tensors: Mapping[str, Tensor], shard_bytes: int) -> list[dict[str, Tensor]]:
    """Divide tensors among files, in a fixed order. Tensors of data types with large elements come first, so that each
    tensor is aligned in memory."""
    shards: list[dict[str, Tensor]] = [{}]
    room = shard_bytes
    for name in sorted(tensors, key=lambda n: (-tensors[n].element_size(), n)):
        if shards[-1] and tensors[name].nbytes > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensors[name]
        room -= tensors[name].nbytes
    return shards


def file_of(tensors: Mapping[str, Tensor]) -> Sequence[memoryview]:
    """Return the content of one safetensors file as buffers: the length of the header, the header, and each tensor."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        described[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return [memoryview(len(header).to_bytes(8, "little") + header), *map(_bytes, tensors.values())]


def _bytes(tensor: Tensor) -> memoryview:
    """Return the tensor's memory as bytes, or a copy of the bytes if the tensor is not on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _join_data(data: Data) -> memoryview:
    parts = split_buffers(data)
    return parts[0] if len(parts) == 1 else memoryview(bytearray().join(parts))


def _tensors(file: str, data: memoryview) -> Iterator[tuple[str, Tensor]]:
    try:
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(bytes(data[8:start]))
        for name, entry in header.items():
            if name != "__metadata__":
                yield name, _tensor(data[start:], entry)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise Corrupt(f"{file} is not a safetensors file: {error}") from error


def _tensor(data: memoryview, entry: Mapping[str, Any]) -> Tensor:
    dtype, (start, end) = NAMES[entry["dtype"]], entry["data_offsets"]
    if start == end:
        return torch.empty(entry["shape"], dtype=dtype)
    part = data[start:end]
    raw = torch.frombuffer(bytearray(part) if part.readonly else part, dtype=torch.uint8)
    return raw.view(dtype).reshape(entry["shape"])
