"""Requests and generations on the way between processes: a few flat arrays for a whole batch.

Unpacking what was packed gives equal values, bit for bit. Pickling a batch object by object costs several
times as much, in both processes, and both share the machine with the engine.

Notation: N requests or generations, T tokens of all of them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.storage.records import Ending
from rollflow.tasks.engines.base import Generation, GenerationRequest

ENDINGS = tuple(Ending)


@dataclass(frozen=True, slots=True)
class PackedRequests:
    ids: list[str]
    prompts_T: NDArray[np.int32]
    lengths_N: list[int]
    settings_N: list[tuple[int, float, int | None]]  # max_new_tokens, temperature, seed


@dataclass(frozen=True, slots=True)
class PackedGenerations:
    ids: list[str]
    tokens_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float64]
    versions_T: NDArray[np.int32]
    lengths_N: list[int]
    endings_N: bytes  # index into ENDINGS


def pack_requests(requests: Sequence[GenerationRequest]) -> PackedRequests:
    return PackedRequests(
        [request.id for request in requests],
        _flat([request.prompt for request in requests], np.int32),
        [len(request.prompt) for request in requests],
        [(request.max_new_tokens, request.temperature, request.seed) for request in requests],
    )


def unpack_requests(packed: PackedRequests) -> list[GenerationRequest]:
    prompts = _cut(packed.prompts_T, packed.lengths_N)
    rows = zip(packed.ids, prompts, packed.settings_N, strict=True)
    return [GenerationRequest(id, prompt, *settings) for id, prompt, settings in rows]


def pack_generations(generations: Sequence[Generation]) -> PackedGenerations:
    return PackedGenerations(
        [generation.id for generation in generations],
        _flat([generation.tokens for generation in generations], np.int32),
        _flat([generation.logprobs for generation in generations], np.float64),
        _flat([generation.versions for generation in generations], np.int32),
        [len(generation.tokens) for generation in generations],
        bytes(ENDINGS.index(generation.ending) for generation in generations),
    )


def unpack_generations(packed: PackedGenerations) -> list[Generation]:
    lengths = packed.lengths_N
    columns = (_cut(array, lengths) for array in (packed.tokens_T, packed.logprobs_T, packed.versions_T))
    endings = (ENDINGS[index] for index in packed.endings_N)
    return [Generation(*row) for row in zip(packed.ids, *columns, endings, strict=True)]


def _flat(rows: Sequence[Sequence[float]], dtype: type) -> NDArray[Any]:
    return np.array([value for row in rows for value in row], dtype=dtype)


def _cut(flat_T: NDArray[Any], lengths_N: Sequence[int]) -> list[tuple[Any, ...]]:
    values = flat_T.tolist()
    cuts: list[tuple[Any, ...]] = []
    start = 0
    for length in lengths_N:
        cuts.append(tuple(values[start : start + length]))
        start += length
    return cuts
