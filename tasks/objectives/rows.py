"""A batch as flat numpy arrays, which objectives and learners use, read from the batch's Arrow columns.

Shapes: R is the number of rows (trajectories), and B the number of tokens with loss mask 1 in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rollflow.storage.arrow_rows import view_numbers
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.model_input import refuse


@dataclass(frozen=True, slots=True)
class BatchRows:
    """A whole batch as flat arrays, with the offset of each row (trajectory). An array is a view of an Arrow buffer,
    and not a copy, if the array's data type allows a view.

    B is the number of tokens with loss mask 1 in the batch. Values for the B tokens with loss mask 1 are a flat array
    or tensor of length B, one row of the batch after the other.
    """

    tokens: np.ndarray  # int32, tokens of all rows
    offsets: np.ndarray  # int64, R + 1: index in `tokens` at which each row begins
    chosen: np.ndarray  # int64, B: indices in `tokens` of the tokens with loss mask 1
    starts: np.ndarray  # int64, R + 1: index at which each row begins in flat arrays of B values
    behaviour: np.ndarray  # float32, B: log-probs in nats under the policy that sampled the token
    versions: np.ndarray  # int32, B: policy version that sampled each token
    groups: np.ndarray  # int64, R: number of each row's group of responses to one prompt, from 0
    rewards: np.ndarray  # float32, R: reward of each row
    branches: np.ndarray | None = None  # bool, R: True if the row is a branch of another row; None: no row is a branch
    # float32, B: reward of each token besides the row's reward, NaN if the token has none; None: no token has one
    token_rewards: np.ndarray | None = None

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
        return cls(
            tokens=view_numbers(tokens.flatten()),
            offsets=offsets,
            chosen=chosen,
            starts=np.searchsorted(chosen, offsets),
            behaviour=view_numbers(_column(table, "logprobs").flatten())[chosen],
            versions=view_numbers(_column(table, "versions").flatten())[chosen],
            groups=np.array([numbers[pair] for pair in pairs], dtype=np.int64),  # type: ignore[index]
            rewards=view_numbers(_column(table, "reward")),
            branches=None if batch.optional("branch") is None else np.array(batch.branches),
            token_rewards=_read_token_rewards(batch, offsets, chosen),
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
        """Number of the row of the batch to which each token with loss mask 1 belongs."""
        return np.repeat(np.arange(len(self.rewards)), self.masked_tokens)


def _read_token_rewards(batch: TrajectoryBatch, offsets: np.ndarray, chosen: np.ndarray) -> np.ndarray | None:
    """Return the rewards of the chosen tokens, NaN for tokens without a reward; None if no row has token rewards."""
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
