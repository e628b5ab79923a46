"""Packs rows (trajectories) of similar length into padded micro-batches of tensors.

Shapes: R rows (trajectories) are packed into L lines (sequences), padded to T tokens each. M is the number of tokens
with loss mask 1 in the micro-batch. Padding is on the right, so under causal attention no real token attends to
padding. If several rows of a line share a prompt, an attention mask keeps these rows from attending to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rollflow.tasks.objectives.rows import BatchRows
from rollflow.tasks.objectives.shared_prefix import PackedSequence, PlacedTokens, lay_out, pack_lines


@dataclass(frozen=True, slots=True)
class ObservedTargets:
    """The O tokens of a micro-batch that the environment added, if the learner trains on them."""

    where: tuple[Tensor, Tensor]  # (O,), (O,): line and position of the token before each token
    targets: Tensor  # (O,) int64: the tokens
    row_O: Tensor  # int64: the row of the batch to which each token belongs


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """L lines, padded to T tokens. A line is a packed sequence: a single row (trajectory), or several rows of a group
    after one copy of their prompt.

    The attribute `where` gives the positions of the hidden states that predict the M tokens with loss mask 1.
    """

    tokens: Tensor  # (L, T) int64
    where: tuple[Tensor, Tensor]  # (M,), (M,): line and position of the token before each token with loss mask 1
    targets: Tensor  # (M,) int64: the tokens with loss mask 1
    row_M: Tensor  # int64: the row of the batch to which each token with loss mask 1 belongs
    among: Tensor  # (M,) int64: index of each token among the batch's B tokens with loss mask 1
    positions: Tensor | None = None  # (L, T) int64: position of each token in its row; None if no row shares a prompt
    part: Tensor | None = None  # (L, T) int64: see `Packing.part`; None if no row shares a prompt
    observed: ObservedTargets | None = None  # None if the environment's tokens are not trained on

    @property
    def predicting(self) -> tuple[Tensor, Tensor]:
        """Lines and positions of the hidden states that predict tokens: first the M tokens with loss mask 1, then the O
        tokens of the environment."""
        if self.observed is None:
            return self.where
        return torch.cat([self.where[0], self.observed.where[0]]), torch.cat([self.where[1], self.observed.where[1]])

    def keep_rows(self, kept_R: Tensor) -> MicroBatch:
        """Return the micro-batch without the tokens with loss mask 1 of rows for which `kept_R` is False. The tokens of
        the environment are kept."""
        kept_M = kept_R[self.row_M]
        return replace(
            self,
            where=(self.where[0][kept_M], self.where[1][kept_M]),
            targets=self.targets[kept_M],
            row_M=self.row_M[kept_M],
            among=self.among[kept_M],
        )

    @property
    def seen(self) -> Tensor | None:
        """The attention mask, of shape (L, 1, T, T). An element of the mask is True if the token of the third axis
        attends to the token of the last axis.

        The attention mask is None if no row shares a prompt.
        """
        return None if self.part is None else build_mask(self.part)

    def inputs(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the decoder's arguments, except `use_cache`, on `device`. The method `inputs` may return before the
        copies to the device are complete."""
        found = {"input_ids": self.tokens.to(device, non_blocking=True)}
        if self.positions is None or self.part is None:
            return found
        # The mask is built on the device, because the mask is T times as large as `part`.
        seen = build_mask(self.part.to(device, non_blocking=True))
        least = torch.finfo(dtype).min
        mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, least)
        return {**found, "position_ids": self.positions.to(device, non_blocking=True), "attention_mask": mask}


def build_mask(part: Tensor) -> Tensor:
    """Return the attention mask, of shape (L, 1, T, T). An element of the mask is True if the token of the third axis
    attends to the token of the last axis.

    Padding attends to padding, because a softmax over no tokens would give NaN.
    """
    asks, asked = part[:, :, None], part[:, None, :]
    before = torch.ones(part.shape[1], part.shape[1], dtype=torch.bool, device=part.device).tril_()
    return (((asked == asks) | (asked == 0)) & before)[:, None]


def micro_batches(
    data: BatchRows,
    rows: Sequence[int],
    micro_tokens: int,
    width: int | None = None,
    own: Callable[[list[PackedSequence]], list[PackedSequence]] = list,
) -> Iterator[MicroBatch]:
    """Split rows of the batch, longest first, into padded micro-batches of at most `micro_tokens` tokens. A line
    (packed sequence) with more than `micro_tokens` tokens is a micro-batch of its own.

    `width` is the width (hidden size) of the model's layers, or None if the model cannot share prompts. If `width` is
    given, responses of a group share one copy of their prompt where sharing saves work (see `shared_prefix.py`). The
    function `own` selects the lines (packed sequences) that this process runs.
    """
    order = own(sorted(pack_lines(data, rows, micro_tokens, width), key=lambda line: (-line.length, line.rows[0])))
    while order:
        take = max(1, micro_tokens // order[0].length)
        yield _micro_batch(data, order[:take])
        order = order[take:]


def _micro_batch(data: BatchRows, lines: Sequence[PackedSequence]) -> MicroBatch:
    laid = lay_out(data, lines)
    several = any(line.prompt for line in lines)
    sampled = laid.sampled
    return MicroBatch(
        tokens=torch.from_numpy(laid.tokens),
        where=(torch.from_numpy(sampled.at[0]), torch.from_numpy(sampled.at[1])),
        targets=_read_targets(data, data.chosen[sampled.among]),
        row_M=torch.from_numpy(sampled.row),
        among=torch.from_numpy(sampled.among),
        positions=torch.from_numpy(laid.positions) if several else None,
        part=torch.from_numpy(laid.part) if several else None,
        observed=_build_observed(data, laid.observed),
    )


def _build_observed(data: BatchRows, placed: PlacedTokens | None) -> ObservedTargets | None:
    if data.observed is None or placed is None:
        return None
    where = torch.from_numpy(placed.at[0]), torch.from_numpy(placed.at[1])
    return ObservedTargets(
        where, _read_targets(data, data.observed.indices[placed.among]), torch.from_numpy(placed.row)
    )


def _read_targets(data: BatchRows, indices: np.ndarray) -> Tensor:
    return torch.from_numpy(data.tokens[indices].astype(np.int64))
