"""Packs generation requests and their results for sending between processes: a few flat columns per batch.

Pickling requests one by one would cost several times as much CPU time. A packed batch consists only of tuples, lists
and bytes, because a dataclass takes ten times as long to pickle.

N is the number of requests or responses in a batch, and T the number of their tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise, starmap
from typing import TypeAlias

from rollflow.storage.model_input import ForeignPart, ModelInput, PlacedPart
from rollflow.storage.records import StopReason
from rollflow.storage.token_arrays import Float32s, Int32s
from rollflow.tasks.engines.base import NO_DRAFTS, DraftCounts, Generation, GenerationRequest, TokenSpan

ENDINGS = tuple(StopReason)

# columns of unfinished responses: ids_N, tokens_T (int32), logprobs_T (float32), versions_T (int32), lengths_N
PackedPartials: TypeAlias = tuple[list[str], bytes, bytes, bytes, list[int]]
# (max_new_tokens, temperature, seed, stop strings) of a request
Settings: TypeAlias = tuple[int, float, int | None, tuple[str, ...]]
# (position, kind, sha256, length) of each part of a prompt that is not text
PackedParts: TypeAlias = list[tuple[int, str, str, int]]
# (episode, number of tokens of earlier turns) of a request of an episode with several turns
Turns: TypeAlias = dict[str, tuple[str, int]]
# columns of requests: ids_N, prompts_T (int32), lengths_N, settings_N; then prefixes, non-text parts of prompts, turns
PackedRequests: TypeAlias = tuple[
    list[str], bytes, list[int], list[Settings], PackedPartials, dict[str, PackedParts], Turns
]
# columns of finished responses: their tokens, the indices of their stop reasons in `ENDINGS`, cached_N; the counts of
# drafts (verified, drafted, accepted) of responses that had drafts
PackedGenerations: TypeAlias = tuple[PackedPartials, bytes, list[int], dict[str, tuple[int, int, int]]]
# result of `EngineActor.collect`: finished responses, failed requests, new tokens of running requests
Collected: TypeAlias = tuple[PackedGenerations, list[tuple[str, Exception]], PackedPartials]


def pack_requests(requests: Sequence[GenerationRequest]) -> PackedRequests:
    prompts = [request.prompt.flat for request in requests]
    return (
        [request.id for request in requests],
        b"".join([prompt.data for prompt in prompts]),
        list(map(len, prompts)),
        [(request.max_new_tokens, request.temperature, request.seed, request.stop) for request in requests],
        pack_partials({request.id: request.prefix for request in requests if request.prefix}),
        {request.id: _pack_parts(request.prompt.placed) for request in requests if request.prompt.placed},
        {request.id: (request.episode, request.earlier) for request in requests if request.episode},
    )


def unpack_requests(packed: PackedRequests) -> list[GenerationRequest]:
    ids, prompts_T, lengths_N, settings_N, packed_prefixes, parts, turns = packed
    flat, prefixes = Int32s(prompts_T), unpack_partials(packed_prefixes)
    placed = {id: _unpack_parts(some) for id, some in parts.items()}
    prompts = [ModelInput(flat[cut], placed.get(id, ())) for id, cut in zip(ids, _build_slices(lengths_N), strict=True)]
    rows = zip(ids, prompts, settings_N, strict=True)
    return [
        GenerationRequest(
            id, prompt, longest, temperature, seed, prefixes.get(id, TokenSpan()), stop, *turns.get(id, ("", 0))
        )
        for id, prompt, (longest, temperature, seed, stop) in rows
    ]


def _pack_parts(placed: Iterable[PlacedPart]) -> PackedParts:
    return [(position, part.kind, part.sha256, part.length) for position, part in placed]


def _unpack_parts(parts: PackedParts) -> tuple[PlacedPart, ...]:
    return tuple(PlacedPart(position, ForeignPart(kind, sha256, length)) for position, kind, sha256, length in parts)


def pack_partials(partials: Mapping[str, TokenSpan]) -> PackedPartials:
    return _pack(list(partials), list(partials.values()))


def unpack_partials(packed: PackedPartials) -> dict[str, TokenSpan]:
    return dict(zip(packed[0], _unpack_columns(packed), strict=True))


def pack_generations(generations: Sequence[Generation]) -> PackedGenerations:
    return (
        _pack([generation.id for generation in generations], [generation.made for generation in generations]),
        bytes([ENDINGS.index(generation.ending) for generation in generations]),
        [generation.cached for generation in generations],
        {generation.id: _pack_drafts(generation.drafts) for generation in generations if generation.drafts.verified},
    )


def unpack_generations(packed: PackedGenerations) -> list[Generation]:
    partials, endings_N, cached_N, drafts = packed
    endings = [ENDINGS[index] for index in endings_N]
    drafts_N = [DraftCounts(*drafts[id]) if id in drafts else NO_DRAFTS for id in partials[0]]
    return list(
        starmap(Generation, zip(partials[0], _unpack_columns(partials), endings, cached_N, drafts_N, strict=True))
    )


def _pack_drafts(counts: DraftCounts) -> tuple[int, int, int]:
    return counts.verified, counts.drafted, counts.accepted


def _pack(ids: list[str], partials: Sequence[TokenSpan]) -> PackedPartials:
    return (
        ids,
        b"".join([partial.tokens.data for partial in partials]),
        b"".join([partial.logprobs.data for partial in partials]),
        b"".join([partial.versions.data for partial in partials]),
        [len(partial) for partial in partials],
    )


def _unpack_columns(packed: PackedPartials) -> list[TokenSpan]:
    _, tokens_T, logprobs_T, versions_T, lengths_N = packed
    tokens, logprobs, versions = Int32s(tokens_T), Float32s(logprobs_T), Int32s(versions_T)
    return [TokenSpan(tokens[cut], logprobs[cut], versions[cut]) for cut in _build_slices(lengths_N)]


def _build_slices(lengths_N: Iterable[int]) -> list[slice]:
    return list(starmap(slice, pairwise(accumulate(lengths_N, initial=0))))
