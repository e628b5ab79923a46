"""The device on which this process runs a policy: the learner and the transformers engine."""

from __future__ import annotations

import torch


def find_device() -> torch.device:
    """Return the first GPU that this process sees, or the processor. Ray shows an actor its own GPUs only."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
