"""Tests whether a model can process several responses after one copy of their prompt (`objectives/shared_prefix.py`).

Responses can share a prompt only if the model obeys the attention mask and the token positions that it is given. A
model with a sliding window, chunked attention or a recurrent state would ignore the attention mask, or would mask wrong
tokens. If a policy's architecture declares a sliding window, chunked attention or a recurrent state, its responses do
not share prompts. A model of any other architecture is tested: the log-probs of two responses after one prompt must
equal the log-probs of each response alone.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch

from rollflow.tasks.learners.forward.token_logprobs import TokenLogprobs
from rollflow.tasks.objectives.packing import MicroBatch, micro_batches
from rollflow.tasks.objectives.rows import BatchRows
from rollflow.tasks.policies.head import HALF, NEAR, measure_distance

PROMPT, RESPONSES = (3, 4, 5, 6), ((7, 8, 9), (8, 7))
REFUSALS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)


def shared_width(model: Any, logprobs: TokenLogprobs) -> int | None:
    """Return the width (hidden size) of the model's layers, or None if responses of this model cannot share a
    prompt."""
    config = model.config.get_text_config()
    if not _has_full_attention(config):
        return None
    try:
        off = _distance(model, logprobs)
    except torch.OutOfMemoryError:
        raise  # running out of memory does not mean that the model cannot share prompts
    except REFUSALS:  # a model raises one of these errors if it does not support the mask or the positions
        return None
    return int(config.hidden_size) if off <= NEAR.get(model.dtype, HALF) else None


def _has_full_attention(config: Any) -> bool:
    """Return True unless the model's configuration declares a layer that attends to only some of the previous
    tokens."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return kinds == {"full_attention"} and window is None


@torch.no_grad()
def _distance(model: Any, logprobs: TokenLogprobs) -> float:
    """Return the largest difference, in nats, between the log-probs of two test responses with a shared prompt and
    without one."""
    rows = _build_test_rows()
    found = [
        torch.cat([_compute_logprobs(model, logprobs, micro) for micro in micro_batches(rows, [0, 1], 100, width)])
        for width in (None, 10**6)  # None: no shared prompts; with a width of 10**6, sharing a prompt always saves work
    ]
    return measure_distance(found[0], found[1])


def _compute_logprobs(model: Any, logprobs: TokenLogprobs, micro: MicroBatch) -> torch.Tensor:
    row, position = (index.to(model.device) for index in micro.where)
    inputs = micro.inputs(model.device, model.dtype)
    return logprobs(inputs, (row, position), micro.targets.to(model.device))[0]


def _build_test_rows() -> BatchRows:
    """Return a test batch of two responses to the same prompt."""
    lengths = [len(PROMPT) + len(response) for response in RESPONSES]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    texts = [token for response in RESPONSES for token in (*PROMPT, *response)]
    own = [np.arange(begin + len(PROMPT), end) for begin, end in pairwise(offsets)]
    starts = np.concatenate([[0], np.cumsum([len(one) for one in own])])
    nothing = np.zeros(int(starts[-1]))
    groups = np.zeros(2, np.int64)
    return BatchRows(np.array(texts), offsets, np.concatenate(own), starts, nothing, nothing, groups, np.zeros(2))
