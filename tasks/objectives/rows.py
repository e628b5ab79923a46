"""Converts a batch from Arrow columns to flat numpy arrays, which objectives and learners use.

Shapes: R is the number of rows (trajectories), and B the number of tokens with loss mask 1 in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from rollflow.storage.arrow_rows import view_numbers
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import Corrupt
from rollflow.storage.model_input import refuse


@dataclass(frozen=True, slots=True)
class ObservedTokens:
    """The tokens of a batch that the environment added after the policy's tokens."""

    indices: np.ndarray  # int64, O: indices in `BatchRows.tokens` of the O observed tokens
    starts: np.ndarray  # int64, R + 1: index in `indices` at which each row begins

    @property
    def counts(self) -> np.ndarray:
        """Number of observed tokens (tokens of the environment) of each row."""
        return np.diff(self.starts)


@dataclass(frozen=True, slots=True)
class BatchRows:
    """A whole batch as flat arrays, with the offset of each row (trajectory). Where the data type allows it, an array
    is a view of an Arrow buffer.

    Arrays of B values have one value for each token with loss mask 1, one row after the other.
    """

    tokens: np.ndarray  # int32, tokens of all rows
    offsets: np.ndarray  # int64, R + 1: index in `tokens` at which each row begins
    chosen: np.ndarray  # int64, B: indices in `tokens` of the tokens with loss mask 1
    starts: np.ndarray  # int64, R + 1: index at which each row begins in flat arrays of B values
    behaviour: np.ndarray  # float32, B: log-probs in nats under the policy that sampled the token
    versions: np.ndarray  # int32, B: policy version that sampled each token
    groups: np.ndarray  # int64, R: number of each row's group, from 0; a group has the same prompt and the same role
    rewards: np.ndarray  # float32, R: reward of each row
    # int64, R: episode number of each row, from 0 (each role of an episode has its own); None if each row is an episode
    episodes: np.ndarray | None = None
    # float32, B: reward of each token in addition to the row's reward, or NaN; None if no token has a reward
    token_rewards: np.ndarray | None = None
    # int64, U: indices in `tokens` at which the U recorded turns begin; a row without recorded turns is a single turn
    turn_starts: np.ndarray | None = None
    turn_states: np.ndarray | None = None  # int64, U: hash of the state of each turn; 0 if the state has no name
    observed: ObservedTokens | None = None  # None if tokens of the environment are not trained on

    @classmethod
    def of(cls, batch: TrajectoryBatch) -> BatchRows:
        """Read the columns of a batch as flat arrays.

        Raises:
            ConfigError: a row of the batch contains something other than tokens, such as an image.
        """
        for placed in batch.foreign_parts if batch.optional("foreign_parts") is not None else ():
            if placed:
                raise refuse(reader="the learner", placed=placed[0])
        table = batch.table
        tokens = _column(table, "tokens")
        offsets = np.concatenate([[0], np.cumsum(view_numbers(tokens.value_lengths()))]).astype(np.int64)
        mask = view_numbers(_column(table, "loss_mask").flatten()).copy()
        mask[offsets[:-1]] = 0  # no hidden state predicts the first token of a row
        chosen = np.flatnonzero(mask)
        numbers = {key: i for i, key in enumerate(batch.keys)}
        pairs = zip(table["index"].to_pylist(), table["attempt"].to_pylist(), strict=True)
        groups = np.array([numbers[pair] for pair in pairs], dtype=np.int64)  # type: ignore[index]
        episodes = _number_episodes(batch)
        return cls(
            tokens=view_numbers(tokens.flatten()),
            offsets=offsets,
            chosen=chosen,
            starts=np.searchsorted(chosen, offsets),
            behaviour=view_numbers(_column(table, "logprobs").flatten())[chosen],
            versions=view_numbers(_column(table, "versions").flatten())[chosen],
            groups=_split_roles(batch, groups),
            rewards=view_numbers(_column(table, "reward")),
            episodes=None if episodes is None else _split_roles(batch, episodes),
            token_rewards=_read_token_rewards(batch, offsets, chosen),
            turn_starts=_read_turn_starts(batch, offsets),
            turn_states=_read_turn_states(batch),
        )

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each row."""
        return np.diff(self.offsets)

    @property
    def masked_tokens(self) -> np.ndarray:
        """Number of tokens with loss mask 1 in each row of the batch."""
        return np.diff(self.starts)

    @property
    def rows(self) -> np.ndarray:
        """Row number of each token with loss mask 1."""
        return np.repeat(np.arange(len(self.rewards)), self.masked_tokens)

    def with_observed(self) -> BatchRows:
        """Return the batch with the indices of its observed tokens (`ObservedTokens`). A token is observed if it
        follows the row's first token with loss mask 1 and was not sampled by the policy.
        """
        last = self.offsets[1:] - 1
        first = (
            last
            if not len(self.chosen)
            else np.where(self.masked_tokens > 0, self.chosen[np.minimum(self.starts[:-1], len(self.chosen) - 1)], last)
        )
        is_observed = np.arange(len(self.tokens)) > np.repeat(first, self.lengths)
        is_observed[self.chosen] = False
        indices = np.flatnonzero(is_observed)
        return replace(self, observed=ObservedTokens(indices, np.searchsorted(indices, self.offsets)))

    @property
    def branches(self) -> np.ndarray:
        """True for each row that continues the episode of an earlier row."""
        found = np.ones(len(self.rewards), dtype=bool)
        found[self.order_by_episode().first] = False
        return found

    def order_by_episode(self) -> EpisodeOrder:
        """Return an order of the tokens with loss mask 1 in which all tokens of an episode are adjacent."""
        if self.episodes is None:
            rows = np.arange(len(self.rewards))
            return EpisodeOrder(np.arange(len(self.chosen)), self.starts, rows, rows)
        _, first = np.unique(self.episodes, return_index=True)
        last = len(self.episodes) - 1 - np.unique(self.episodes[::-1], return_index=True)[1]
        of_tokens = self.episodes[self.rows]
        starts = np.concatenate([[0], np.cumsum(np.bincount(of_tokens, minlength=len(first)))])
        return EpisodeOrder(np.argsort(of_tokens, kind="stable"), starts, first, last)


@dataclass(frozen=True, slots=True)
class EpisodeOrder:
    """The tokens of a batch with loss mask 1, ordered by episode. In shapes, E is the number of episodes."""

    tokens: np.ndarray  # int64, B: indices of the tokens, one episode after the other
    starts: np.ndarray  # int64, E + 1: position in `tokens` at which each episode begins
    first: np.ndarray  # int64, E: first row of each episode
    last: np.ndarray  # int64, E: last row of each episode


def _number_episodes(batch: TrajectoryBatch) -> np.ndarray | None:
    """Return the episode number of each row; None if no row is a branch.

    Raises:
        Corrupt: a branch does not come after the row from which it was split off.
    """
    column = batch.optional("branch")
    if column is None:
        return None
    names = [batch.table[name].to_pylist() for name in ("index", "attempt", "sample")]
    found, numbers = list[int](), dict[tuple[int, int, int], int]()
    for (index, attempt, sample), branch in zip(zip(*names, strict=True), column.to_pylist(), strict=True):
        parent = None if branch is None else (index, attempt, branch["parent"])
        if parent is not None and parent not in numbers:
            raise Corrupt(
                f"sample {sample} of prompt {index} branches off sample {parent[2]}, but no earlier row has this sample"
            )
        found.append(max(found, default=-1) + 1 if parent is None else numbers[parent])
        numbers[index, attempt, sample] = found[-1]
    return np.array(found, np.int64)


def _split_roles(batch: TrajectoryBatch, numbers_R: np.ndarray) -> np.ndarray:
    """Number rows again, so that rows have equal new numbers only if their old numbers and their roles are equal.

    The new numbers of a role are consecutive, so that each minibatch contains groups of all roles.
    """
    if batch.optional("role") is None:
        return numbers_R
    names = dict[str | None, int]()
    roles_R = np.array([names.setdefault(role, len(names)) for role in batch.roles], np.int64)
    found: np.ndarray = np.unique(np.stack([roles_R, numbers_R]), axis=1, return_inverse=True)[1].reshape(-1)
    return found


def _read_turn_starts(batch: TrajectoryBatch, offsets: np.ndarray) -> np.ndarray | None:
    """Return the indices of the tokens at which the recorded turns begin; None if no turns are recorded."""
    column = batch.optional("turn_starts")
    if column is None:
        return None
    found: np.ndarray = np.repeat(offsets[:-1], _count_values(column)) + view_numbers(column.flatten())
    return found


def _read_turn_states(batch: TrajectoryBatch) -> np.ndarray | None:
    """Return the hash of the state of each recorded turn, 0 for an unnamed state; return None if no state has a
    name.
    """
    column, starts = batch.optional("turn_states"), batch.optional("turn_starts")
    if column is None or starts is None:
        return None
    turns_R = _count_values(starts)
    found = np.zeros(int(turns_R.sum()), np.int64)
    found[np.repeat(view_numbers(column.is_valid()).astype(bool), turns_R)] = view_numbers(column.flatten())
    return found


def _count_values(lists: pa.Array) -> np.ndarray:
    """Return the number of values of each list; 0 if the list is null."""
    lengths = np.diff(view_numbers(lists.offsets)).astype(np.int64)  # Arrow's `fill_null` would import pandas
    return np.where(view_numbers(lists.is_valid()), lengths, 0)


def _read_token_rewards(batch: TrajectoryBatch, offsets: np.ndarray, chosen: np.ndarray) -> np.ndarray | None:
    """Return the rewards of the tokens with loss mask 1, NaN for a token without reward; return None if no row has
    token rewards."""
    column = batch.optional("token_rewards")
    if column is None:
        return None
    is_valid = view_numbers(column.is_valid()).astype(bool)
    every = np.full(offsets[-1], np.nan, np.float32)
    every[np.repeat(is_valid, np.diff(offsets))] = view_numbers(column.flatten())
    found: np.ndarray = every[chosen]
    return found


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table[name].combine_chunks()
    return column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
