"""Requests and generations on the way between processes: a few flat arrays for a whole batch.

Unpacking what was packed gives equal values, bit for bit. Pickling a batch object by object costs several
times as much, in both processes, and both share the machine with the engine.

Notation: N requests, generations or partials, T tokens of all of them together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.storage.records import Ending
from rollflow.tasks.engines.base import Generation, GenerationRequest, Partial

ENDINGS = tuple(Ending)


@dataclass(frozen=True, slots=True)
class PackedRequests:
    ids: list[str]
    prompts_T: NDArray[np.int32]
    lengths_N: list[int]
    settings_N: list[tuple[int, float, int | None]]  # max_new_tokens, temperature, seed
    prefixes: PackedPartials  # of the few that have one


@dataclass(frozen=True, slots=True)
class PackedPartials:
    ids: list[str]
    tokens_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float64]
    versions_T: NDArray[np.int32]
    lengths_N: list[int]


@dataclass(frozen=True, slots=True)
class PackedGenerations:
    stretches: PackedPartials
    endings_N: bytes  # index into ENDINGS


@dataclass(frozen=True, slots=True)
class Collected:
    """What `collect` brings: requests that ended, one way or the other, and new tokens of those that run."""

    finished: PackedGenerations
    errors: list[tuple[str, Exception]]
    progress: PackedPartials


def pack_requests(requests: Sequence[GenerationRequest]) -> PackedRequests:
    return PackedRequests(
        [request.id for request in requests],
        _flat([request.prompt for request in requests], np.int32),
        [len(request.prompt) for request in requests],
        [(request.max_new_tokens, request.temperature, request.seed) for request in requests],
        pack_partials({request.id: request.prefix for request in requests if request.prefix}),
    )


def unpack_requests(packed: PackedRequests) -> list[GenerationRequest]:
    prompts = _cut(packed.prompts_T, packed.lengths_N)
    prefixes = unpack_partials(packed.prefixes)
    rows = zip(packed.ids, prompts, packed.settings_N, strict=True)
    return [GenerationRequest(id, prompt, *settings, prefixes.get(id, Partial())) for id, prompt, settings in rows]


def pack_partials(partials: Mapping[str, Partial]) -> PackedPartials:
    return _pack(list(partials), list(partials.values()))


def unpack_partials(packed: PackedPartials) -> dict[str, Partial]:
    return {id: Partial(*columns) for id, *columns in _rows(packed)}


def pack_generations(generations: Sequence[Generation]) -> PackedGenerations:
    return PackedGenerations(
        _pack([generation.id for generation in generations], generations),
        bytes(ENDINGS.index(generation.ending) for generation in generations),
    )


def unpack_generations(packed: PackedGenerations) -> list[Generation]:
    endings = (ENDINGS[index] for index in packed.endings_N)
    return [Generation(*row) for row in _rows(packed.stretches, endings)]


def _pack(ids: list[str], stretches: Sequence[Partial | Generation]) -> PackedPartials:
    return PackedPartials(
        ids,
        _flat([stretch.tokens for stretch in stretches], np.int32),
        _flat([stretch.logprobs for stretch in stretches], np.float64),
        _flat([stretch.versions for stretch in stretches], np.int32),
        [len(stretch.tokens) for stretch in stretches],
    )


def _rows(packed: PackedPartials, *more: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """(id, tokens, logprobs, versions, ...) of each."""
    columns = (_cut(array, packed.lengths_N) for array in (packed.tokens_T, packed.logprobs_T, packed.versions_T))
    return zip(packed.ids, *columns, *more, strict=True)


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
