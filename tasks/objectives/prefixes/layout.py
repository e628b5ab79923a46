"""Converts lines (packed sequences of rows) to padded arrays, and finds the position of each row's tokens in the
arrays.

A row's tokens lie in token runs. A token run is a sequence of tokens at consecutive positions of a line. The tokens
that a row does not share with the row before it are a token run of their own; the row's other tokens lie in token runs
of earlier rows.

    line    p p p a a a b b        runs    p p p a a a      begins at token 0 of the first row
                                           b b              begins at token 3 of the second row; its parent is the first

In shapes, L is the number of lines, and T the padded number of tokens of a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rollflow.tasks.objectives.prefixes.lines import PackedSequence
from rollflow.tasks.objectives.rows import BatchRows

FAR = 2**32  # a number above any number of tokens in a row


@dataclass(frozen=True, slots=True)
class PlacedTokens:
    """The positions of tokens in packed lines, one row after the other. In shapes, N is the number of tokens."""

    at: tuple[np.ndarray, np.ndarray]  # (N,), (N,): line and position of the token before each token
    among: np.ndarray  # (N,): index of each token among the batch's tokens with loss mask 1, or observed tokens
    row: np.ndarray  # (N,): row of the batch to which each token belongs


@dataclass(slots=True)
class PlacedRun:
    """A token run: tokens of a row at consecutive positions of a line."""

    place: int  # position of the first token in the line
    begin: int  # index of the first token in the row
    length: int  # number of tokens
    parent: int  # index of the token run from which this one branches off; -1 if this one begins a row
    end: int = 0  # position after the last token of this token run and of all that branch off from it, directly or not
    open: int = 0  # index in the row up to which a later row may share the tokens of this token run


@dataclass(frozen=True, slots=True)
class Packing:
    """Padded lines as arrays."""

    tokens: np.ndarray  # (L, T) int64: tokens of the lines; 0 for padding
    positions: np.ndarray  # (L, T) int64: position of each token in its row
    # (L, T) int64: position after the last token that attends to each token. A token attends to itself, and to each
    # token before it whose `last` is larger than the attending token's position.
    last: np.ndarray
    runs: list[PlacedRun]  # token runs of all lines
    sampled: PlacedTokens  # the M tokens with loss mask 1
    observed: PlacedTokens | None  # the tokens that the environment added; None if they are not trained on


def lay_out(data: BatchRows, lines: Sequence[PackedSequence]) -> Packing:
    """Convert lines (packed sequences) to arrays, padded to the length of the longest line."""
    shape = len(lines), max(line.length for line in lines)
    tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    rows = np.array([row for line in lines for row in line.rows], np.int64)
    shared = np.array([count for line in lines for count in line.shared], np.int64)
    of_row = np.repeat(np.arange(len(lines)), [len(line.rows) for line in lines])
    own = data.lengths[rows] - shared
    behind = np.cumsum(own) - own  # number of tokens in earlier rows of all lines
    before = np.concatenate([[0], np.cumsum([line.length for line in lines])])[:-1]
    places = behind - before[of_row]

    def each(found: np.ndarray) -> np.ndarray:
        """Return consecutive numbers for the tokens of each row, starting with the row's element of `found`."""
        counted: np.ndarray = np.repeat(found - behind, own) + np.arange(int(own.sum()))
        return counted

    at = np.repeat(of_row, own), each(places)
    tokens[at] = data.tokens[each(data.offsets[:-1][rows] + shared)]
    positions[at] = each(shared)
    traced = _Tracing(np.full(shape, shape[1], np.int64))
    for row, (line, place, begin, count) in enumerate(
        zip(*(found.tolist() for found in (of_row, places, shared, own)), strict=True)
    ):
        traced.add_row(row, line, place, begin, count)
    traced.end_line()
    find = _TokenFinder(rows, of_row, np.array(traced.keys), np.array(traced.shifts))
    observed = None if data.observed is None else find(data, data.observed.indices, data.observed.starts)
    return Packing(tokens, positions, traced.last, traced.runs, find(data, data.chosen, data.starts), observed)


@dataclass(slots=True)
class _Tracing:
    """Follows the path of token runs from row to row. A row's path is the list of token runs in which its tokens
    lie.
    """

    last: np.ndarray
    runs: list[PlacedRun] = field(default_factory=list)
    path: list[int] = field(default_factory=list)  # indices of the current row's token runs
    line: int = 0
    length: int = 0  # number of tokens of the current line
    keys: list[int] = field(default_factory=list)  # for each token run of a row's path: row x FAR + the run's `begin`
    shifts: list[int] = field(default_factory=list)  # for each token run of a row's path: `place` - `begin`

    def add_row(self, row: int, line: int, place: int, begin: int, count: int) -> None:
        """Add a row. The `count` tokens that the row does not share begin at index `begin` of the row, and at position
        `place` of the line.
        """
        if line != self.line:
            self.end_line()
            self.line = line
        self._leave(begin, place)
        if count:
            parent = self.path[-1] if self.path else -1
            self.path.append(len(self.runs))
            self.runs.append(PlacedRun(place, begin, count, parent, open=begin + count))
        self.length = place + count
        for number in self.path:
            run = self.runs[number]
            self.keys.append(row * FAR + run.begin)
            self.shifts.append(run.place - run.begin)

    def end_line(self) -> None:
        """End the current line. The padding of a line attends to the tokens of the line's last row."""
        for number in self.path:
            self.runs[number].end = self.length
        self.path.clear()

    def _leave(self, begin: int, place: int) -> None:
        """Keep the path's tokens before index `begin` of the row. Tokens from position `place` on do not attend to the
        path's other tokens.
        """
        while self.path:
            run = self.runs[self.path[-1]]
            first = max(run.begin, begin)
            if first < run.open:
                shift = run.place - run.begin
                self.last[self.line, shift + first : shift + run.open] = place
                run.open = first
            if run.begin < begin:
                return
            run.end = place
            self.path.pop()


@dataclass(frozen=True, slots=True)
class _TokenFinder:
    """Finds the positions of rows' tokens in lines."""

    rows: np.ndarray  # the rows of the batch, in the order of the lines
    of_row: np.ndarray  # the line of each row
    keys: np.ndarray  # see `_Tracing`
    shifts: np.ndarray

    def __call__(self, data: BatchRows, indices: np.ndarray, starts: np.ndarray) -> PlacedTokens:
        """Return the positions of tokens. `indices` are the indices of the tokens in the batch, and `starts` gives the
        position in `indices` at which each row begins.
        """
        counts = starts[self.rows + 1] - starts[self.rows]
        number = np.repeat(np.arange(len(self.rows)), counts)
        among = np.arange(len(number)) + np.repeat(starts[self.rows] - np.cumsum(counts) + counts, counts)
        # index of the token before each token, counted from the beginning of the row
        before = indices[among] - data.offsets[self.rows][number] - 1
        run = np.searchsorted(self.keys, number * FAR + before, side="right") - 1
        return PlacedTokens((self.of_row[number], before + self.shifts[run]), among, self.rows[number])
