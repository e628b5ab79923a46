"""From Arrow columns to tensors: padded micro-batches of rows of like length.

Shapes: R rows (trajectories), T padded tokens, M loss-masked tokens of the rows at hand. Padding is on the
right, so causal attention never sees it and no attention mask is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from rollflow.storage.batch import TrajectoryBatch


@dataclass(frozen=True, slots=True)
class Rows:
    """A whole batch as flat arrays with row offsets (views of the Arrow buffers where types allow).

    B are its loss-masked tokens, one row after the other. Whatever is known of each is a flat (B,) array or tensor.
    """

    tokens: np.ndarray  # int32, all rows' tokens
    offsets: np.ndarray  # int64, R + 1: where each row begins in `tokens`
    chosen: np.ndarray  # int64, (B,) where the loss-masked tokens are in `tokens`
    starts: np.ndarray  # int64, R + 1: where each row begins in what is flat over B
    behaviour: np.ndarray  # float32, (B,) nats
    versions: np.ndarray  # int32, (B,) that sampled each token
    groups: np.ndarray  # int64, R: number of each row's group, from 0
    rewards: np.ndarray  # float32, R

    @classmethod
    def of(cls, batch: TrajectoryBatch) -> Rows:
        """Open a batch's columns."""
        table = batch.table
        tokens = _column(table, "tokens")
        offsets = np.concatenate([[0], np.cumsum(_view(tokens.value_lengths()))]).astype(np.int64)
        mask = _view(_column(table, "loss_mask").flatten().cast(pa.uint8())).copy()
        mask[offsets[:-1]] = 0  # nothing predicts a first token
        chosen = np.flatnonzero(mask)
        numbers = {key: i for i, key in enumerate(batch.keys)}
        pairs = zip(table["index"].to_pylist(), table["attempt"].to_pylist(), strict=True)
        return cls(
            tokens=_view(tokens.flatten()),
            offsets=offsets,
            chosen=chosen,
            starts=np.searchsorted(chosen, offsets),
            behaviour=_view(_column(table, "logprobs").flatten())[chosen],
            versions=_view(_column(table, "versions").flatten())[chosen],
            groups=np.array([numbers[pair] for pair in pairs], dtype=np.int64),  # type: ignore[index]
            rewards=_view(_column(table, "reward")),
        )

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row."""
        return np.diff(self.offsets)

    @property
    def masked_tokens(self) -> np.ndarray:
        """Loss-masked tokens of each row."""
        return np.diff(self.starts)

    @property
    def rows(self) -> np.ndarray:
        """(B,) row of each masked token."""
        return np.repeat(np.arange(len(self.rewards)), self.masked_tokens)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows, padded. `where` picks their M masked tokens: position t - 1 predicts token t."""

    rows: Tensor  # (r,) rows of the batch
    tokens: Tensor  # (r, T) int64
    where: tuple[Tensor, Tensor]  # (M,) row within the micro-batch, (M,) position of the predicting token
    targets: Tensor  # (M,) int64
    among: Tensor  # (M,) int64: which of the batch's B masked tokens they are


def micro_batches(data: Rows, rows: Sequence[int], micro_tokens: int) -> Iterator[MicroBatch]:
    """Split rows, longest first, into padded micro-batches of at most `micro_tokens` (one row at least)."""
    order = sorted(rows, key=lambda r: (-int(data.lengths[r]), r))
    while order:
        take = max(1, micro_tokens // int(data.lengths[order[0]]))
        yield _micro_batch(data, order[:take])
        order = order[take:]


def _micro_batch(data: Rows, rows: list[int]) -> MicroBatch:
    tokens = np.zeros((len(rows), int(data.lengths[rows[0]])), dtype=np.int64)
    for i, row in enumerate(rows):
        tokens[i, : data.lengths[row]] = data.tokens[data.offsets[row] : data.offsets[row + 1]]
    among = np.concatenate([np.arange(data.starts[row], data.starts[row + 1]) for row in rows])
    at_row = np.repeat(np.arange(len(rows)), data.masked_tokens[rows])
    at_token = data.chosen[among] - data.offsets[rows][at_row]
    where = (torch.from_numpy(at_row), torch.from_numpy(at_token - 1))
    return MicroBatch(
        rows=torch.tensor(rows),
        tokens=torch.from_numpy(tokens),
        where=where,
        targets=torch.from_numpy(tokens[at_row, at_token]),
        among=torch.from_numpy(among),
    )


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table[name].combine_chunks()
    return column.chunk(0) if isinstance(column, pa.ChunkedArray) else column


def _view(values: pa.Array) -> np.ndarray:
    """The numbers as they lie in the Arrow buffer; `to_numpy` would first import pandas, on the way of a restart."""
    return np.from_dlpack(values)
