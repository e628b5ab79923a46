"""Packs rows (trajectories) of similar length into padded micro-batches of tensors.

Shapes: R rows (trajectories) are packed into L lines (sequences), padded to T tokens each. M is the number of tokens
with loss mask 1 in the micro-batch. Padding is on the right, so under causal attention no real token attends to
padding. If several rows of a line share tokens, no token of a row attends to tokens that only other rows have.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollflow.tasks.objectives.prefixes.blocks import build_mask, fill_mask, split_attention
from rollflow.tasks.objectives.prefixes.layout import FAR, Packing, PlacedTokens, lay_out
from rollflow.tasks.objectives.prefixes.lines import PackedSequence, Sharing, join_lines, pack_lines
from rollflow.tasks.objectives.rows import BatchRows


@dataclass(frozen=True, slots=True)
class ObservedTargets:
    """The O tokens of a micro-batch that the environment added, if the learner trains on them."""

    where: tuple[Tensor, Tensor]  # (O,), (O,): line and position of the token before each token
    targets: Tensor  # (O,) int64: the tokens
    row_O: Tensor  # int64: the row of the batch to which each token belongs


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """L lines, padded to T tokens. A line is a packed sequence: a row (trajectory), or several rows, each without the
    tokens that it shares with the row before it.

    The attribute `where` gives the positions of the hidden states that predict the M tokens with loss mask 1.
    """

    tokens: Tensor  # (L, T) int64
    where: tuple[Tensor, Tensor]  # (M,), (M,): line and position of the token before each token with loss mask 1
    targets: Tensor  # (M,) int64: the tokens with loss mask 1
    row_M: Tensor  # int64: the row of the batch to which each token with loss mask 1 belongs
    among: Tensor  # (M,) int64: index of each token among the batch's B tokens with loss mask 1
    positions: Tensor | None = None  # (L, T) int64: position of each token in its row; None if no row shares tokens
    last: Tensor | None = None  # (L, T) int64: `Packing.last`, for the attention mask; None if no row shares tokens
    packing: Packing | None = None  # the layout, if each token attends only to its path; then L is 1
    most: int = 0  # with `packing`: largest number of tokens of a tree whose attention is dense
    observed: ObservedTargets | None = None  # None if the environment's tokens are not trained on
    # (M,) int64: number of each token. Tokens that several rows share have one number, because one hidden state
    # predicts them. None if all numbers differ.
    number: Tensor | None = None

    @property
    def predicting(self) -> tuple[Tensor, Tensor]:
        """Lines and positions of the hidden states that predict tokens: first the M tokens with loss mask 1, then the O
        tokens of the environment."""
        if self.observed is None:
            return self.where
        return torch.cat([self.where[0], self.observed.where[0]]), torch.cat([self.where[1], self.observed.where[1]])

    def keep_rows(self, kept_R: Tensor) -> MicroBatch:
        """Return the micro-batch without the sampled tokens (loss mask 1) of those rows for which `kept_R` is False.
        The tokens of the environment are kept.
        """
        kept_M = kept_R[self.row_M]
        return replace(
            self,
            where=(self.where[0][kept_M], self.where[1][kept_M]),
            targets=self.targets[kept_M],
            row_M=self.row_M[kept_M],
            among=self.among[kept_M],
            number=None if self.number is None else self.number[kept_M],
        )

    def find_distinct(self, some: slice) -> tuple[Tensor, Tensor] | None:
        """Return the indices of the distinct tokens in the slice `some` of the tokens with loss mask 1, and for each
        token of the slice the index of its distinct token. Return None if all tokens are distinct.
        """
        if self.number is None:
            return None
        _, first, index = np.unique(self.number[some].numpy(), return_index=True, return_inverse=True)
        return (torch.from_numpy(first), torch.from_numpy(index)) if len(first) < len(index) else None

    @property
    def seen(self) -> Tensor | None:
        """The attention mask, of shape (L, 1, T, T). An element of the mask is True if the token of the third axis
        attends to the token of the last axis.

        The attention mask is None if no row shares tokens.
        """
        return None if self.last is None else build_mask(self.last)

    def inputs(self, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        """Return the decoder's arguments, except `use_cache`, on `device`. The method `inputs` may return before the
        copies to the device are complete."""
        found: dict[str, Any] = {"input_ids": self.tokens.to(device, non_blocking=True)}
        if self.positions is None or self.last is None:
            return found
        found["position_ids"] = self.positions.to(device, non_blocking=True)
        if self.packing is not None:
            # A mask of four dimensions keeps transformers from building a mask of its own.
            blocks = split_attention(self.packing, self.most, dtype)
            return {**found, "attention_mask": torch.zeros((1, 1, 1, 1), dtype=dtype), "prefix_blocks": blocks}
        # The mask is built on the device, because the mask is T times as large as `last`.
        seen = build_mask(self.last.to(device, non_blocking=True))
        return {**found, "attention_mask": fill_mask(seen, dtype)}


def micro_batches(
    data: BatchRows,
    rows: Sequence[int],
    micro_tokens: int,
    sharing: Sharing | None = None,
    own: Callable[[list[PackedSequence]], list[PackedSequence]] = list,
) -> Iterator[MicroBatch]:
    """Split rows of the batch, longest first, into padded micro-batches of at most `micro_tokens` tokens. A line
    (packed sequence) with more than `micro_tokens` tokens is a micro-batch of its own.

    `sharing` says which tokens rows of a group share, or is None if the model cannot share tokens (see
    `prefixes/lines.py`). The function `own` selects the lines (packed sequences) that this process runs.
    """
    order = own(sorted(pack_lines(data, rows, micro_tokens, sharing), key=lambda line: (-line.length, line.rows[0])))
    while order:
        if sharing is None or not sharing.by_path:
            take = max(1, micro_tokens // order[0].length)
            yield _micro_batch(data, order[:take])
        else:  # all lines become one line, so there is no padding
            take = max(1, bisect_right(list(accumulate(line.length for line in order)), micro_tokens))
            yield _micro_batch(data, [join_lines(order[:take])], sharing.dense)
        order = order[take:]


def _micro_batch(data: BatchRows, lines: Sequence[PackedSequence], most: int | None = None) -> MicroBatch:
    """Return lines as a micro-batch. `most` is `Sharing.dense` if each token attends to its path only, else None."""
    laid = lay_out(data, lines)
    several = most is not None or any(len(line.rows) > 1 for line in lines)
    sampled = laid.sampled
    return MicroBatch(
        tokens=torch.from_numpy(laid.tokens),
        where=(torch.from_numpy(sampled.at[0]), torch.from_numpy(sampled.at[1])),
        targets=_read_targets(data, data.chosen[sampled.among]),
        row_M=torch.from_numpy(sampled.row),
        among=torch.from_numpy(sampled.among),
        positions=torch.from_numpy(laid.positions) if several else None,
        last=torch.from_numpy(laid.last) if several else None,
        packing=None if most is None else laid,
        most=most or 0,
        observed=_build_observed(data, laid.observed),
        number=_number_tokens(laid, data.tokens[data.chosen[sampled.among]]) if several else None,
    )


def _number_tokens(laid: Packing, targets_M: np.ndarray) -> Tensor | None:
    """Return `MicroBatch.number`, the number of each token with loss mask 1; return None if all numbers differ."""
    line_M, place_M = laid.sampled.at
    keys_M = (line_M * laid.tokens.shape[1] + place_M) * FAR + targets_M
    distinct, number_M = np.unique(keys_M, return_inverse=True)
    return torch.from_numpy(number_M) if len(distinct) < len(number_M) else None


def _build_observed(data: BatchRows, placed: PlacedTokens | None) -> ObservedTargets | None:
    if data.observed is None or placed is None:
        return None
    where = torch.from_numpy(placed.at[0]), torch.from_numpy(placed.at[1])
    return ObservedTargets(
        where, _read_targets(data, data.observed.indices[placed.among]), torch.from_numpy(placed.row)
    )


def _read_targets(data: BatchRows, indices: np.ndarray) -> Tensor:
    return torch.from_numpy(data.tokens[indices].astype(np.int64))
