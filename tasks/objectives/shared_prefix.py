"""A line is a sequence of tokens that a model processes. A line may contain several responses of a group after one
copy of their prompt, so that the prompt is processed only once.

    rows    p p p a a a      line    p p p a a a b b          b attends to p and to b, and its positions follow p's
            p p p b b

Attention over a shared line is dense (T x T), so a row joins a line only if a separate line would cost more
computation.

In shapes, R is the number of rows, L the number of lines, and T the padded number of tokens of a line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from rollflow.tasks.objectives.rows import BatchRows

PAIRS = 6  # for each token, the rest of a layer costs as much as attention over PAIRS x width pairs


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """A line: one row (trajectory), or several rows of a group after one copy of their prompt."""

    rows: tuple[int, ...]
    prompt: int  # number of tokens of the shared prompt; 0 if the line has a single row
    length: int  # number of tokens of the whole line (packed sequence)


def pack_lines(data: BatchRows, rows: Sequence[int], most: int, width: int | None) -> list[PackedSequence]:
    """Pack `rows` into lines. A line (sequence) of several rows has at most `most` tokens. If `width` is None, every
    line has one row."""
    if width is None:
        return [_single_line(data, row) for row in rows]
    ordered = sorted(rows, key=lambda row: (data.groups[row], -data.lengths[row], row))
    parts = (list(part) for _, part in groupby(ordered, key=lambda row: data.groups[row]))
    return [line for part in parts for line in _pack_group(data, part, most, width)]


def _single_line(data: BatchRows, row: int) -> PackedSequence:
    return PackedSequence((row,), 0, int(data.lengths[row]))


def _pack_group(data: BatchRows, rows: list[int], most: int, width: int) -> Iterator[PackedSequence]:
    """Pack the rows of one group into lines (packed sequences), and yield the lines. A row is added to the line of the
    previous row if one line costs less computation than two lines."""
    prompt, line = _shared_prompt(data, rows), _single_line(data, rows[0])
    for row in rows[1:]:
        own = int(data.lengths[row]) - prompt
        if prompt and line.length + own <= most and _saves_work(line.length, own, prompt, PAIRS * width):
            line = PackedSequence((*line.rows, row), prompt, line.length + own)
        else:
            yield line
            line = _single_line(data, row)
    yield line


def _saves_work(length: int, own: int, prompt: int, pairs: int) -> bool:
    """Return True if adding the `own` tokens of a row to a packed sequence of `length` tokens costs less than a
    separate sequence.

    Attention in a separate sequence is causal, so it costs about half as much as dense attention.
    """
    joined = own * pairs + 2 * length * own + own**2
    return joined < (prompt + own) * pairs + (prompt + own) ** 2 / 2


def _shared_prompt(data: BatchRows, rows: list[int]) -> int:
    """Return the length of the shared prompt: the number of leading tokens that are equal in all rows and that the
    policy did not sample."""
    if len(rows) < 2:
        return 0
    firsts = [data.chosen[data.starts[r]] if data.masked_tokens[r] else data.offsets[r + 1] for r in rows]
    most = min(int(first - data.offsets[r]) for first, r in zip(firsts, rows, strict=True))
    heads = np.stack([data.tokens[data.offsets[r] : data.offsets[r] + most] for r in rows])
    return int(np.logical_and.accumulate((heads == heads[0]).all(0)).sum())


@dataclass(frozen=True, slots=True)
class PlacedTokens:
    """Tokens of packed lines, one row after the other. In shapes, N is the number of the tokens."""

    at: tuple[np.ndarray, np.ndarray]  # (N,), (N,): line and position of the token before each token
    among: np.ndarray  # (N,): index of each token among the batch's tokens of this kind
    row: np.ndarray  # (N,): row of the batch to which each token belongs


@dataclass(frozen=True, slots=True)
class Packing:
    """Padded lines as arrays."""

    tokens: np.ndarray  # (L, T) int64: tokens of the lines; 0 for padding
    positions: np.ndarray  # (L, T) int64: position of each token in its row
    part: np.ndarray  # (L, T) int64: 0 for a prompt or a single row; 1, 2, ... for rows after a prompt; -1 for padding
    sampled: PlacedTokens  # the M tokens with loss mask 1
    observed: PlacedTokens | None  # the tokens that the environment added; None if they are not trained on


def lay_out(data: BatchRows, lines: Sequence[PackedSequence]) -> Packing:
    """Convert lines (packed sequences) to arrays, padded to the length of the longest line."""
    shape = len(lines), max(line.length for line in lines)
    tokens, positions, part = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
    placed = list[_PlacedRow]()
    for i, line in enumerate(lines):
        tokens[i, : line.prompt] = data.tokens[data.offsets[line.rows[0]] :][: line.prompt]
        positions[i, : line.prompt], part[i, : line.prompt] = np.arange(line.prompt), 0
        place = line.prompt
        for number, row in enumerate(line.rows, 1 if line.prompt else 0):
            begin, end = int(data.offsets[row]), int(data.offsets[row + 1])
            here = slice(place, place + end - begin - line.prompt)
            tokens[i, here] = data.tokens[begin + line.prompt : end]
            positions[i, here], part[i, here] = np.arange(line.prompt, end - begin), number
            placed.append(_PlacedRow(row, i, begin, line.prompt, place))
            place = here.stop
    observed = None if data.observed is None else _place_tokens(data.observed.indices, data.observed.starts, placed)
    return Packing(tokens, positions, part, _place_tokens(data.chosen, data.starts, placed), observed)


class _PlacedRow(NamedTuple):
    row: int
    line: int
    begin: int  # index of the row's first token in the batch
    prompt: int  # number of tokens of the shared prompt
    place: int  # position in the line of the row's first token after the shared prompt


def _place_tokens(indices: np.ndarray, starts: np.ndarray, placed: Sequence[_PlacedRow]) -> PlacedTokens:
    """Find the tokens of placed rows in their lines. `indices` are the indices of tokens in the batch, and `starts`
    gives the position in `indices` at which each row begins."""
    at_line, at_place, among, of_row = [], [], [], []
    for one in placed:
        own = np.arange(starts[one.row], starts[one.row + 1])
        before = indices[own] - one.begin - 1  # position in the row of the token before each token
        at_place.append(np.where(before < one.prompt, before, before - one.prompt + one.place))
        at_line.append(np.full(len(own), one.line))
        among.append(own)
        of_row.append(np.full(len(own), one.row))
    at = np.concatenate(at_line), np.concatenate(at_place)
    return PlacedTokens(at, np.concatenate(among), np.concatenate(of_row))
