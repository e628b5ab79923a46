"""Checks the optional columns of a trajectory batch, such as the outcome, the turns and the scorer version.

Suffixes of array names give the shapes: `_R` for rows, `_T` for the tokens of all rows, `_S` for sets of candidate
tokens, and `_K` for the tokens in the sets of candidates.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollflow.storage.audit.report import ViolationKind
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.model_input import NO_TOKEN
from rollflow.storage.optional_columns import read_parts
from rollflow.storage.records import GroupKey, Outcome

VERSION = re.compile("[0-9a-f]{12}")
Found = tuple[ViolationKind, str]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class _Rows:
    """The required columns of a trajectory batch, with which the batch's optional columns are compared."""

    keys: list[GroupKey]
    samples: list[int]
    first_R: Array  # position of the row's first token in `tokens_T`
    length_R: Array  # length of the row in tokens
    tokens_T: Array
    mask_T: Array
    turns_R: Array  # number of turns of the row; 0 if the row's turns are not recorded
    vocabulary: int

    @classmethod
    def of(cls, batch: TrajectoryBatch, vocabulary: int) -> _Rows:
        table = batch.table
        pairs = zip(table["index"].to_pylist(), table["attempt"].to_pylist(), strict=True)
        length_R = pc.list_value_length(table["tokens"]).to_numpy()
        tokens_T, mask_T = (pc.list_flatten(table[name]).to_numpy() for name in ("tokens", "loss_mask"))
        keys, samples = [GroupKey(*pair) for pair in pairs], table["sample"].to_pylist()
        starts = batch.optional("turn_starts")
        turns_R = np.zeros(len(batch), np.int64) if starts is None else _lengths(starts)
        first_R = np.cumsum(length_R) - length_R
        return cls(keys, samples, first_R, length_R, tokens_T, mask_T, turns_R, vocabulary)

    def span(self, row: int) -> slice:
        """Return the slice of the array `tokens_T` that contains the tokens of the given row."""
        first = int(self.first_R[row])
        return slice(first, first + int(self.length_R[row]))

    def name(self, row: int) -> str:
        """Return the name of a trajectory, in the form that `rollflow inspect` prints."""
        return f"{self.keys[row].prompt}.{self.keys[row].attempt}.{self.samples[row]}"


def check_optional(batch: TrajectoryBatch, vocabulary: int, *, judges_all: bool = False) -> Iterator[Found]:
    """Report impossible values in the optional columns of a batch; all token ids must be below `vocabulary`.

    If `judges_all` is true, an unjudged response that is not left out is also reported.

    The caller must first check with the module `rows` that all list columns of a row have the same length.
    """
    columns = {name: column for name in CHECKS if (column := batch.optional(name)) is not None}
    if columns:
        rows = _Rows.of(batch, vocabulary)
        for name, column in columns.items():
            yield from CHECKS[name](rows, column)
        if judges_all and "outcome" in columns:
            left_out_R = batch.left_out.tolist()
            for row, outcome in enumerate(columns["outcome"].to_pylist()):
                if outcome == Outcome.UNJUDGED and not left_out_R[row]:
                    yield "unjudged", f"nobody judged trajectory {rows.name(row)}, and the batch contains it"


def _check_parts(rows: _Rows, column: pa.Array) -> Iterator[Found]:
    for row, parts in enumerate(column.to_pylist()):
        repeated = [name for name, times in Counter(name for name, _ in parts or ()).items() if times > 1]
        if repeated:
            yield "altered", f"trajectory {rows.name(row)} has the reward part {repeated[0]!r} more than once"
        elif not all(isfinite(value) for _, value in parts or ()):
            yield "lineage", f"a reward part of trajectory {rows.name(row)} is not finite: {dict(parts)}"


def _check_outcomes(rows: _Rows, column: pa.Array) -> Iterator[Found]:
    for row, outcome in enumerate(column.to_pylist()):
        if outcome is not None and outcome not in {*Outcome}:
            expected = [*map(str, Outcome)]
            yield "lineage", f"trajectory {rows.name(row)} has the outcome {outcome!r}; expected one of {expected}"


def _check_turns(rows: _Rows, column: pa.Array) -> Iterator[Found]:
    """Check that the turns of a trajectory are in order and begin with sampled tokens, and that each sequence of
    sampled tokens begins a turn."""
    for row, starts in enumerate(column.to_pylist()):
        if starts is None:
            continue
        mask = rows.mask_T[rows.span(row)]
        place = np.array(starts, np.int64)
        begun = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
        if (np.diff(place) <= 0).any():
            yield "lineage", f"the turns of trajectory {rows.name(row)} do not ascend: {starts}"
        elif place.size and (place[0] < 0 or place[-1] >= len(mask)):
            yield "altered", f"a turn of trajectory {rows.name(row)} lies outside of its {len(mask)} tokens: {starts}"
        elif not mask[place].all() or not np.isin(begun, place).all():
            what = (
                f"the turns of trajectory {rows.name(row)} are {starts}, the policy's tokens begin at {begun.tolist()}"
            )
            yield "lineage", what


def _check_branches(rows: _Rows, column: pa.Array) -> Iterator[Found]:
    """Check that each trajectory that branches off another one continues an earlier row of the same group and begins
    with the same tokens."""
    earlier: dict[tuple[GroupKey, int], int] = {}
    for row, branch in enumerate(column.to_pylist()):
        if branch is not None:
            parent, position = branch["parent"], branch["position"]
            name, other = rows.name(row), earlier.get((rows.keys[row], parent))
            most = 0 if other is None else min(rows.length_R[row], rows.length_R[other])
            if other is None:
                yield "lineage", f"trajectory {name} branches off sample {parent}, which is not before it in its group"
            elif not 0 <= position <= most:
                yield "lineage", f"trajectory {name} branches off sample {parent} at token {position} of {most}"
            elif (rows.tokens_T[rows.span(row)][:position] != rows.tokens_T[rows.span(other)][:position]).any():
                yield "lineage", f"trajectory {name} and sample {parent} differ before token {position}, its branch"
        earlier[rows.keys[row], rows.samples[row]] = row


def _check_experts(rows: _Rows, column: pa.Array) -> Iterator[Found]:
    """Check that the same number of experts is recorded for every token of the batch; the number -1 stands for an
    unknown expert."""
    count_R, valid_R = _lengths(column), _valid(column)
    tokens_R = np.maximum(rows.length_R, 1)
    wrong = np.flatnonzero(valid_R & (count_R % tokens_R != 0))
    if wrong.size:
        row = int(wrong[0])
        what = f"{rows.length_R[row]} tokens and {count_R[row]} routed experts"
        yield "altered", f"trajectory {rows.name(row)} has {what}, which is not a whole number per token"
    elif len(widths := {*(count_R // tokens_R)[valid_R].tolist()}) > 1:
        yield "altered", f"trajectories have different numbers of routed experts per token: {sorted(widths)}"
    if pc.min(column.flatten()).as_py() is not None and pc.min(column.flatten()).as_py() < -1:
        yield "lineage", "a routed expert is below -1, the number of an unknown expert"


def _check_kept(rows: _Rows, column: pa.Array) -> Iterator[Found]:
    """Check that there is one set of candidate tokens (after top-k and top-p) per token, and that each sampled token is
    in its set."""
    wrong = np.flatnonzero(_valid(column) & (_lengths(column) != rows.length_R))
    if wrong.size:
        row = int(wrong[0])
        what = f"{rows.length_R[row]} tokens and {_lengths(column)[row]} sets of kept tokens"
        yield "altered", f"trajectory {rows.name(row)} has {what}"
        return
    place_S = np.flatnonzero(np.repeat(_valid(column), rows.length_R))
    sets = column.flatten()
    size_S, kept_K = _lengths(sets), sets.flatten().to_numpy()
    full_S, mask_S = size_S > 0, rows.mask_T[place_S]
    owner_K = np.repeat(np.arange(len(size_S)), size_S)
    has_S = np.zeros(len(size_S), bool)
    has_S[owner_K[kept_K == rows.tokens_T[place_S][owner_K]]] = True
    if (full_S & ~mask_S).any():
        yield "lineage", "a token that the policy did not sample has a set of kept tokens"
    if (full_S & mask_S & ~has_S).any():
        yield "lineage", "a sampled token is not in its set of kept tokens"
    if kept_K.size and (kept_K.min() < 0 or kept_K.max() >= rows.vocabulary):
        yield "lineage", f"a kept token lies outside of the policy's vocabulary, which has {rows.vocabulary} tokens"


def _check_foreign(rows: _Rows, column: pa.Array) -> Iterator[Found]:
    """Check that the foreign parts (such as images) of a row do not overlap, and that all tokens at their positions are
    `NO_TOKEN`."""
    for row, placed in enumerate(read_parts(column)):
        tokens, mask = rows.tokens_T[rows.span(row)], rows.mask_T[rows.span(row)]
        name, end = rows.name(row), 0
        for position, part in placed:
            stop = position + part.length
            what = f"the {part.kind} of {part.length} positions at position {position} of trajectory {name}"
            if not (end <= position < stop <= len(tokens)):
                yield "altered", f"{what} overlaps another part or the end, {len(tokens)}"
                break
            if mask[position:stop].any() or (tokens[position:stop] != NO_TOKEN).any():
                yield "lineage", f"{what} has tokens of its own"
            end = stop


def _check_scorers(rows: _Rows, column: pa.Array) -> Iterator[Found]:
    for row, version in enumerate(column.to_pylist()):
        if version is not None and not VERSION.fullmatch(version):
            what = f"trajectory {rows.name(row)} has the scorer version {version!r}; expected 12 hexadecimal digits"
            yield "lineage", what


def _check_token_rewards(rows: _Rows, column: pa.Array) -> Iterator[Found]:
    """Check that token rewards have one entry per token, that only sampled tokens have a reward, and that none is
    infinite.
    """
    wrong = np.flatnonzero(_valid(column) & (_lengths(column) != rows.length_R))
    if wrong.size:
        row = int(wrong[0])
        what = f"{rows.length_R[row]} tokens and {_lengths(column)[row]} token rewards"
        yield "altered", f"trajectory {rows.name(row)} has {what}"
        return
    reward_S, mask_S = column.flatten().to_numpy(), rows.mask_T[np.repeat(_valid(column), rows.length_R)]
    if np.isinf(reward_S).any():
        yield "lineage", "the reward of a token is infinite"
    if (~np.isnan(reward_S) & ~mask_S).any():
        yield "lineage", "a token that the policy did not sample has a token reward"


def _check_states(rows: _Rows, column: pa.Array) -> Iterator[Found]:
    """Check that there is one state per turn."""
    wrong = np.flatnonzero(_valid(column) & (_lengths(column) != rows.turns_R))
    if wrong.size:
        row = int(wrong[0])
        what = f"{rows.turns_R[row]} turns and {_lengths(column)[row]} states of turns"
        yield "altered", f"trajectory {rows.name(row)} has {what}"


def _check_roles(rows: _Rows, column: pa.Array) -> Iterator[Found]:
    for row, role in enumerate(column.to_pylist()):
        if role == "":
            yield "lineage", f"trajectory {rows.name(row)} has a role without a name"


def _check_left_out(rows: _Rows, column: pa.Array) -> Iterator[Found]:
    for row, left_out in enumerate(column.to_pylist()):
        if left_out is False:
            yield "altered", f"trajectory {rows.name(row)} is marked as not left out; only left-out ones are marked"


CHECKS: dict[str, Callable[[_Rows, pa.Array], Iterator[Found]]] = {
    "reward_parts": _check_parts,
    "outcome": _check_outcomes,
    "turn_starts": _check_turns,
    "branch": _check_branches,
    "routed_experts": _check_experts,
    "kept_tokens": _check_kept,
    "foreign_parts": _check_foreign,
    "scorer_version": _check_scorers,
    "token_rewards": _check_token_rewards,
    "turn_states": _check_states,
    "role": _check_roles,
    "left_out": _check_left_out,
}


def _lengths(column: pa.Array) -> Array:
    lengths: Array = column.value_lengths().fill_null(0).to_numpy()
    return lengths


def _valid(column: pa.Array) -> Array:
    valid: Array = column.is_valid().to_numpy(zero_copy_only=False)
    return valid
