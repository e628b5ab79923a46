"""Packs rows (trajectories) into lines. A line is a sequence of tokens that a model processes: one row, or several rows
of a group. In a line of several rows, a row leaves out the leading tokens that it shares with the row before it.

    rows    p p p a a a      line    p p p a a a b b          b attends to p and to b, and its positions follow p's
            p p p b b

If attention over a line is dense (T x T), a row joins a line only if a separate line would cost more computation.

In shapes, R is the number of rows, L the number of lines, and T the padded number of tokens of a line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from rollflow.tasks.objectives.prefixes.order import count_shared, order_rows
from rollflow.tasks.objectives.rows import BatchRows

# per token, the rest of a layer (all but attention) costs as much as attention over PAIRS x width query-key pairs
PAIRS = 6
MERGE = 16  # merging two blocks for a token costs as much as the rest of a layer for MERGE / width tokens
DENSE = 64  # number of tokens up to which attention over a whole tree costs less than attention along its paths


@dataclass(frozen=True, slots=True)
class Sharing:
    """The tokens that the rows of a line may share, and the kind of attention to these tokens."""

    width: int  # width (hidden size) of the model's layers
    prefixes: bool = True  # True: all leading tokens are shared; False: only the prompt of a group
    by_path: bool = False  # True: each token attends to its path only (`blocks`); False: attention over a line is dense
    dense: int = DENSE  # with `by_path`: attention over a tree of at most so many tokens is dense


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """A line: one row (trajectory), or several rows, each without the leading tokens that it shares with the row before
    it.
    """

    rows: tuple[int, ...]
    shared: tuple[int, ...]  # number of leading tokens that each row shares with the row before it; 0 for a first row
    length: int  # number of tokens of the whole line (packed sequence)


def pack_lines(data: BatchRows, rows: Sequence[int], most: int, sharing: Sharing | None) -> list[PackedSequence]:
    """Pack `rows` into lines. A line (sequence) of several rows has at most `most` tokens. If `sharing` is None, every
    line has one row."""
    lengths = data.lengths.tolist()
    if sharing is None:
        return [PackedSequence((row,), (0,), lengths[row]) for row in rows]
    if sharing.prefixes:
        ordered = order_rows(data, rows)
        shared = count_shared(data, ordered).tolist()
    else:
        ordered = sorted(rows, key=lambda row: (data.groups[row], -data.lengths[row], row))
        shared = _count_prompts(data, ordered)
    return list(_join_rows(ordered, shared, lengths, most, sharing))


def join_lines(lines: Sequence[PackedSequence]) -> PackedSequence:
    """Return one line with the rows of all lines, one line after the other."""
    rows = tuple(row for line in lines for row in line.rows)
    shared = tuple(count for line in lines for count in line.shared)
    return PackedSequence(rows, shared, sum(line.length for line in lines))


def _join_rows(
    rows: Sequence[int], shared: Sequence[int], lengths: Sequence[int], most: int, sharing: Sharing
) -> Iterator[PackedSequence]:
    """Yield lines of ordered rows. A row is added to the line of the previous row if one line costs less computation
    than two lines. A new line begins with the whole row."""
    line, counts, length = list[int](), list[int](), 0
    for row, count in zip(rows, shared, strict=True):
        own = lengths[row] - count
        fits = bool(line) and count > 0 and length + own <= most
        if fits and _saves_work(length, own, count, sharing):
            length += own
        else:
            if line:
                yield PackedSequence(tuple(line), tuple(counts), length)
            line, counts, length, count = [], [], lengths[row], 0
        line.append(row)
        counts.append(count)
    if line:
        yield PackedSequence(tuple(line), tuple(counts), length)


def _saves_work(length: int, own: int, shared: int, sharing: Sharing) -> bool:
    """Return True if adding the `own` tokens of a row to a packed sequence of `length` tokens costs less than a
    separate sequence.

    Attention in a separate sequence is causal, so it costs about half as much as dense attention. Attention along paths
    costs the same as in separate sequences, but the results of two blocks must be merged for each own token.
    """
    if sharing.by_path:
        return own * MERGE < shared * sharing.width
    pairs = PAIRS * sharing.width
    joined = own * pairs + 2 * length * own + own**2
    return joined < (shared + own) * pairs + (shared + own) ** 2 / 2


def _count_prompts(data: BatchRows, ordered: Sequence[int]) -> list[int]:
    """Return for each row the length of its group's shared prompt; 0 for the first row of a group."""
    found = list[int]()
    for _, part in groupby(ordered, key=lambda row: data.groups[row]):
        rows = list(part)
        found += [0, *[_shared_prompt(data, rows)] * (len(rows) - 1)]
    return found


def _shared_prompt(data: BatchRows, rows: list[int]) -> int:
    """Return the length of the shared prompt: the number of leading tokens that are equal in all rows and that the
    policy did not sample."""
    if len(rows) < 2:
        return 0
    firsts = [data.chosen[data.starts[r]] if data.masked_tokens[r] else data.offsets[r + 1] for r in rows]
    most = min(int(first - data.offsets[r]) for first, r in zip(firsts, rows, strict=True))
    heads = np.stack([data.tokens[data.offsets[r] : data.offsets[r] + most] for r in rows])
    return int(np.logical_and.accumulate((heads == heads[0]).all(0)).sum())
