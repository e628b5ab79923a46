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
    """A whole batch as flat arrays with row offsets (views of the Arrow buffers where types allow)."""

    tokens: np.ndarray  # int32, all rows' tokens
    mask: np.ndarray  # bool
    behaviour: np.ndarray  # float32, nats
    versions: np.ndarray  # int32, that sampled each token
    offsets: np.ndarray  # int64, R + 1
    groups: np.ndarray  # int64, R: number of each row's group, from 0
    rewards: np.ndarray  # float32, R

    @classmethod
    def of(cls, batch: TrajectoryBatch) -> Rows:
        """Open a batch's columns."""
        table = batch.table
        tokens = _column(table, "tokens")
        offsets = np.concatenate([[0], np.cumsum(_view(tokens.value_lengths()))])
        numbers = {key: i for i, key in enumerate(batch.keys)}
        pairs = zip(table["index"].to_pylist(), table["attempt"].to_pylist(), strict=True)
        return cls(
            tokens=_view(tokens.flatten()),
            mask=_view(_column(table, "loss_mask").flatten().cast(pa.uint8())).view(bool),
            behaviour=_view(_column(table, "logprobs").flatten()),
            versions=_view(_column(table, "versions").flatten()),
            offsets=offsets.astype(np.int64),
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
        return np.add.reduceat(self.mask.astype(np.int64), self.offsets[:-1])


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows, padded. `where` picks the M masked tokens: position t - 1 predicts token t."""

    rows: Tensor  # (r,) rows of the batch
    tokens: Tensor  # (r, T) int64
    where: tuple[Tensor, Tensor]  # (M,) row within the micro-batch, (M,) position of the predicting token
    targets: Tensor  # (M,) int64
    behaviour: Tensor  # (M,) float32
    versions: Tensor  # (M,) int32, that sampled them


def micro_batches(data: Rows, rows: Sequence[int], micro_tokens: int) -> Iterator[MicroBatch]:
    """Split rows, longest first, into padded micro-batches of at most `micro_tokens` (one row at least)."""
    order = sorted(rows, key=lambda r: (-int(data.lengths[r]), r))
    while order:
        take = max(1, micro_tokens // int(data.lengths[order[0]]))
        yield _micro_batch(data, order[:take])
        order = order[take:]


def _micro_batch(data: Rows, rows: list[int]) -> MicroBatch:
    longest = int(data.lengths[rows[0]])
    tokens = np.zeros((len(rows), longest), dtype=np.int64)
    mask = np.zeros((len(rows), longest), dtype=bool)
    behaviour = np.zeros((len(rows), longest), dtype=np.float32)
    versions = np.zeros((len(rows), longest), dtype=np.int32)
    for i, row in enumerate(rows):
        part = slice(data.offsets[row], data.offsets[row + 1])
        length = int(data.lengths[row])
        tokens[i, :length], mask[i, :length] = data.tokens[part], data.mask[part]
        behaviour[i, :length], versions[i, :length] = data.behaviour[part], data.versions[part]
    mask[:, 0] = False  # nothing predicts the first token
    at_row, at_token = (torch.from_numpy(a) for a in np.nonzero(mask))
    padded = torch.from_numpy(tokens)
    return MicroBatch(
        rows=torch.tensor(rows),
        tokens=padded,
        where=(at_row, at_token - 1),
        targets=padded[at_row, at_token],
        behaviour=torch.from_numpy(behaviour)[at_row, at_token],
        versions=torch.from_numpy(versions)[at_row, at_token],
    )


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table[name].combine_chunks()
    return column.chunk(0) if isinstance(column, pa.ChunkedArray) else column


def _view(values: pa.Array) -> np.ndarray:
    """The numbers as they lie in the Arrow buffer; `to_numpy` would first import pandas, on the way of a restart."""
    return np.from_dlpack(values)
