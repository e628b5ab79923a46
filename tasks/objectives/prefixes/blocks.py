"""Splits attention over prefix trees into blocks. The cost of attention then grows with the lengths of the tokens'
paths, instead of with the square of the tree's size.

    p p p a a a b b      each token run attends to itself, causally  (p p p a a a), (b b)
                         tokens after a fork attend to the path      (b b) to (p p p)

A token run is a sequence of tokens at consecutive positions (see `layout`). A block of the second kind contains all
tokens after a fork except the first branch, which continues the token run. In depth-first order, these tokens have
consecutive positions, and so have the tokens of the token run before the fork. Trees and branches with few tokens are
padded to similar lengths, and their attention is dense, with a mask, because many small blocks would cost more.

In shapes, N is the number of trees, and T their padded number of tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollflow.tasks.objectives.prefixes.layout import Packing, PlacedRun

Span = tuple[int, int]  # first position, and position after the last


@dataclass(frozen=True, slots=True)
class PaddedTrees:
    """N small trees, padded to T tokens, in which attention is dense."""

    places_N: Tensor  # (N x T,) int64: position of each token in the line; for padding, the tree's first position
    kept: Tensor  # int64: indices in `places_N` of tokens that are not padding
    count: int  # N
    mask: Tensor  # (N, 1, T, T): zero if the token of the third axis attends to the token of the last axis


@dataclass(frozen=True, slots=True)
class AttentionBlocks:
    """The blocks of attention over a line of prefix trees. Each token of the line is in one of the blocks `causal` or
    `padded`."""

    causal: tuple[Span, ...]  # token runs, inside which attention is causal
    padded: tuple[PaddedTrees, ...]
    paths: tuple[tuple[Span, Span], ...]  # span of tokens, and span of earlier tokens to which all of them attend


def split_attention(laid: Packing, most: int, dtype: torch.dtype) -> AttentionBlocks:
    """Split attention over a single line into blocks. Attention over a tree of at most `most` tokens is dense."""
    runs, causal, small = laid.runs, list[Span](), list[Span]()
    paths: dict[Span, Span] = {}
    for run in runs:
        inside = run.parent >= 0 and _size(runs[run.parent]) <= most
        if inside:
            continue  # the parent's tree is dense, and contains this token run
        whole = _size(run) <= most
        span = run.place, run.end if whole else run.place + run.length
        (small if span[1] - span[0] <= most else causal).append(span)
        if run.parent >= 0:
            parent = runs[run.parent]
            seen = parent.place, parent.place + run.begin - parent.begin
            paths[seen] = paths.get(seen, (run.place, 0))[0], run.end  # branches of a fork are adjacent
    trees = tuple(_pad_trees(part, laid.last[0], dtype) for part in _group_by_size(small))
    return AttentionBlocks(tuple(causal), trees, tuple((tokens, seen) for seen, tokens in paths.items()))


def build_mask(last: Tensor) -> Tensor:
    """Return the attention mask, of shape (L, 1, T, T). An element of the mask is True if the token of the third axis
    attends to the token of the last axis. See `Packing.last`.

    Padding attends to padding, because a softmax over no tokens would give NaN.
    """
    places = torch.arange(last.shape[1], device=last.device)
    before = torch.ones(last.shape[1], last.shape[1], dtype=torch.bool, device=last.device).tril_()
    return ((places[:, None] < last[:, None, :]) & before)[:, None]


def fill_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to the scores of attention: zero where `seen` is True."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)


def _size(run: PlacedRun) -> int:
    """Return the number of tokens of a token run and of all token runs that branch off from it."""
    return run.end - run.place


def _group_by_size(spans: Sequence[Span]) -> list[list[Span]]:
    """Group spans of similar lengths, so that little padding is needed."""
    found = defaultdict[int, list[Span]](list)
    for span in spans:
        size = span[1] - span[0]
        step = max(8, 1 << max(0, size.bit_length() - 3))
        found[-(-size // step) * step].append(span)
    return [found[key] for key in sorted(found)]


def _pad_trees(spans: Sequence[Span], last: np.ndarray, dtype: torch.dtype) -> PaddedTrees:
    begins, ends = (np.array(found)[:, None] for found in zip(*spans, strict=True))
    longest = int((ends - begins).max())
    steps = np.arange(longest)[None]
    real = begins + steps < ends
    places = np.where(real, begins + steps, begins)
    ends_of = np.where(real, np.minimum(last[places], ends) - begins, longest)
    mask = fill_mask(build_mask(torch.from_numpy(ends_of)), dtype)
    kept = torch.from_numpy(np.flatnonzero(real))
    return PaddedTrees(torch.from_numpy(places.reshape(-1)), kept, len(spans), mask)
