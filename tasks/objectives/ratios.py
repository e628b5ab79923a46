"""Computes probability ratios of two policies for the same tokens, from log-probs in nats. In shapes, M is the number
of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollflow.tasks.objectives.surrogate_config import Level

BOUND = 20.0  # largest log-ratio, in nats; float32 overflows at e^88, far above e^20 = 5e8


def log_ratio(new_M: Tensor, old_M: Tensor, row_M: Tensor, level: Level) -> Tensor:
    """Return the log-ratio log(new / old) of each token, clipped to [-`BOUND`, `BOUND`].

    With the level `sequence`, each token gets the sum of the log-ratios of its row, the log-ratio of the whole
    response. With the level `geometric`, each token gets the mean of the log-ratios of its row (GSPO: Zheng et al.
    2025).
    """
    change_M = new_M - old_M
    if level != "token":
        rows = int(row_M.max()) + 1 if len(row_M) else 0
        sum_R = torch.zeros(rows, dtype=change_M.dtype, device=change_M.device).index_add(0, row_M, change_M)
        if level == "geometric":
            sum_R = sum_R / torch.bincount(row_M, minlength=rows).clamp(min=1)
        change_M = sum_R[row_M]
    return change_M.clamp(-BOUND, BOUND)
