"""Tests whether a model can compute leading tokens once for all rows (trajectories) that share them
(`objectives/prefixes`).

Rows can share tokens only if the model obeys the attention mask and the token positions that it is given. A model with
a sliding window, chunked attention or a recurrent state would ignore the attention mask, or would mask wrong tokens. If
a policy's architecture declares a sliding window, chunked attention or a recurrent state, its rows share no tokens. A
model of any other architecture is tested: the log-probs of rows that form a tree, with a branch within a branch, must
equal the log-probs of each row alone.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from rollflow.tasks.learners.config import TrainBase
from rollflow.tasks.learners.forward.path_attention import use_path_attention
from rollflow.tasks.learners.forward.token_logprobs import TokenLogprobs
from rollflow.tasks.objectives.packing import MicroBatch, micro_batches
from rollflow.tasks.objectives.prefixes.lines import Sharing
from rollflow.tasks.objectives.rows import BatchRows
from rollflow.tasks.policies.head import HALF, NEAR, measure_distance

# rows of the test, which share 4, 5 or 6 tokens with each other; the last row is a prefix of another row
PROMPT, RESPONSES = (3, 4, 5, 6), ((7, 8, 9), (7, 8, 3, 4), (7, 3), (8, 7), (7, 8))
REFUSALS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)


def find_sharing(model: Any, logprobs: TokenLogprobs, config: TrainBase) -> Sharing | None:
    """Return how rows of this model share tokens, or None if they share none."""
    own = model.config.get_text_config()
    if config.share_prefixes == "none" or not _has_full_attention(own):
        return None
    lines = Sharing(int(own.hidden_size), prefixes=config.share_prefixes == "all")
    found = [lines]
    if lines.prefixes and use_path_attention(model):
        found.insert(0, replace(lines, by_path=True))
    return next((sharing for sharing in found if _fits(model, logprobs, sharing)), None)


def _fits(model: Any, logprobs: TokenLogprobs, sharing: Sharing) -> bool:
    """Return True if rows of the model may share tokens as `sharing` says."""
    try:
        off = _distance(model, logprobs, sharing)
    except torch.OutOfMemoryError:
        raise  # running out of memory does not mean that the model cannot share tokens
    except REFUSALS:  # a model raises one of these errors if it does not support the mask or the positions
        return False
    return off <= NEAR.get(model.dtype, HALF)


def _has_full_attention(config: Any) -> bool:
    """Return True unless the model's configuration declares a layer that attends to only some of the previous
    tokens."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return kinds == {"full_attention"} and window is None


@torch.no_grad()
def _distance(model: Any, logprobs: TokenLogprobs, sharing: Sharing) -> float:
    """Return the largest difference, in nats, between the log-probs of test rows with shared tokens and without."""
    rows = _build_test_rows()
    found = []
    # With a width of 10**6, sharing always saves work; with `dense` = 2, there are attention blocks of each kind.
    for way in (None, replace(sharing, width=10**6, dense=2)):
        found_B = torch.zeros(len(rows.chosen), device=model.device)
        for micro in micro_batches(rows, range(len(RESPONSES)), 100, way):
            found_B[micro.among] = _compute_logprobs(model, logprobs, micro)
        found.append(found_B)
    return measure_distance(found[0], found[1])


def _compute_logprobs(model: Any, logprobs: TokenLogprobs, micro: MicroBatch) -> torch.Tensor:
    row, position = (index.to(model.device) for index in micro.where)
    inputs = micro.inputs(model.device, model.dtype)
    return logprobs(inputs, (row, position), micro.targets.to(model.device))[0]


def _build_test_rows() -> BatchRows:
    """Return a test batch of several responses to the same prompt."""
    lengths = [len(PROMPT) + len(response) for response in RESPONSES]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    texts = [token for response in RESPONSES for token in (*PROMPT, *response)]
    own = [np.arange(begin + len(PROMPT), end) for begin, end in pairwise(offsets)]
    starts = np.concatenate([[0], np.cumsum([len(one) for one in own])])
    nothing = np.zeros(int(starts[-1]))
    groups, rewards = np.zeros(len(RESPONSES), np.int64), np.zeros(len(RESPONSES))
    return BatchRows(np.array(texts), offsets, np.concatenate(own), starts, nothing, nothing, groups, rewards)
