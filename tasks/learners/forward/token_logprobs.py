"""Computes the log-probs of given tokens under a policy, with the model's own output head.

    tokens --> decoder --> hidden states at the wanted positions --> head (see `policies/head`) --> log-probs

Logits are computed for one chunk of tokens at a time, because the logits of 16,384 tokens take 10 GB at a vocabulary of
151,936. Logits of more than one chunk are recomputed in the backward pass.

In shapes, R is the number of rows, T the padded number of tokens, M the number of positions, H the hidden size, and V
the size of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rollflow.tasks.learners.forward.inplace_logprobs import chosen_tokens
from rollflow.tasks.policies.adding_embedding import AddingEmbedding
from rollflow.tasks.policies.head import LMHead

LOGITS_BYTES = 2**26  # largest number of bytes of the float32 logits of one chunk of tokens
ON_GPU = 16  # factor of `LOGITS_BYTES` on a GPU, because small chunks would leave the GPU mostly idle
Pass = Callable[..., tuple[Tensor, Tensor | None]]  # the call signature of `TokenLogprobs`


class TokenLogprobs:
    """Computes log-probs of tokens under `model`, without copying the model's parameters."""

    def __init__(self, model: Any, *, judged: bool = True) -> None:
        """Find the decoder, the output head and the embedding of `model`; see `LMHead` for `judged`."""
        self._head = LMHead(model, judged=judged)
        self._decoder = model.get_decoder()
        self._embedding = AddingEmbedding(model)
        self._times = ON_GPU if model.device.type == "cuda" else 1

    def __call__(
        self,
        inputs: Mapping[str, Tensor],
        where: tuple[Tensor, Tensor],
        targets_M: Tensor,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-probs of `targets_M` in nats at `temperature`; with `entropy`, also return the entropies.

        `inputs` are the decoder's arguments, such as the (R, T) `input_ids`. `where` gives, for each target token, the
        (row, position) of the token before it.
        """
        return self.of(self.hidden(inputs, where), targets_M, temperature=temperature, entropy=entropy)

    def hidden(self, inputs: Mapping[str, Tensor], where: tuple[Tensor, Tensor]) -> Tensor:
        """Return the hidden states, of shape (M, H), at the positions `where`."""
        return cast(Tensor, self._decoder(**inputs, use_cache=False).last_hidden_state[where])

    def of(
        self, hidden_MH: Tensor, targets_M: Tensor, *, temperature: float = 1.0, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probs computed from hidden states; if `entropy` is set, also return the entropies.

        If the logits of all tokens exceed one chunk, the backward pass recomputes the logits chunk by chunk.
        """
        parts = max(1, math.ceil(len(targets_M) / self._chunk))
        if parts == 1:
            return self._compute_chosen(hidden_MH, targets_M, temperature, entropy)
        chunks = zip(hidden_MH.tensor_split(parts), targets_M.tensor_split(parts), strict=True)
        logps, entropies = zip(*(self._recompute_chosen(*chunk, temperature, entropy) for chunk in chunks), strict=True)
        return torch.cat(logps), torch.cat(entropies) if entropy else None

    @contextmanager
    def add_in_place(self) -> Iterator[None]:
        """Add up gradients in place during backward passes in the `with` block, to save memory."""
        with self._head.add_in_place(), self._embedding.add_in_place():
            yield

    def parts(self, row_M: Tensor, *, by_token: bool) -> list[slice]:
        """Split the M tokens of a micro-batch into slices; `row_M` has the row number of each token.

        With `by_token`, no slice has more tokens than a chunk. Without `by_token`, a slice consists of whole rows, and
        may have more tokens than a chunk.
        """
        return self._split_evenly(len(row_M)) if by_token else self._split_by_row(row_M)

    def _split_evenly(self, count: int) -> list[slice]:
        parts = max(1, math.ceil(count / self._chunk))
        return [slice(count * part // parts, count * (part + 1) // parts) for part in range(parts)]

    def _split_by_row(self, row_M: Tensor) -> list[slice]:
        ends = [*(row_M.diff().nonzero().squeeze(1) + 1).tolist(), len(row_M)]
        found, begin = list[slice](), 0
        for end, after in zip(ends, [*ends[1:], math.inf], strict=True):
            if after - begin > self._chunk and end > begin:
                found.append(slice(begin, end))
                begin = end
        return found or [slice(0, 0)]  # a batch without tokens needs one slice, whose loss is zero

    @property
    def _chunk(self) -> int:
        """Number of tokens in one chunk, whose logits are computed at the same time."""
        return max(1, self._times * LOGITS_BYTES // (4 * self._head.vocabulary))

    def _compute_chosen(
        self, hidden_MH: Tensor, targets_M: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        return chosen_tokens(self._head(hidden_MH).float(), targets_M, temperature=temperature, entropy=entropy)

    def _recompute_chosen(
        self, hidden_MH: Tensor, targets_M: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the result of `_compute_chosen`; the backward pass recomputes the logits instead of storing them."""
        found = checkpoint(
            self._compute_chosen,
            *(hidden_MH, targets_M, temperature, entropy),
            use_reentrant=False,
            preserve_rng_state=False,  # `_compute_chosen` draws no random numbers
        )
        return cast(tuple[Tensor, Tensor | None], found)
