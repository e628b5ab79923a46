"""Finds NaN and infinity in batches, losses and gradients, and raises `NotFinite` before the optimizer uses them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rollflow.storage.errors import NotFinite
from rollflow.tasks.learners.base import AGAIN
from rollflow.tasks.objectives.rows import BatchRows


def check_batch(data: BatchRows, version: int) -> None:
    """Raise `NotFinite` if a log-prob or a reward of the batch is a NaN or an infinity, which an objective might hide
    by clipping."""
    made_by = {"a log-prob": (data.behaviour, "engine"), "a reward": (data.rewards, "verifier")}
    for name, (values, maker) in made_by.items():
        wrong = values[~np.isfinite(values)]
        if len(wrong):
            raise NotFinite(
                f"version {version + 1} is not trained, because {name} of batch {version} is {wrong[0]}; fix the "
                f"{maker}, and {AGAIN}"
            )


def check_figures(figures: Mapping[str, float], version: int, key: str = "train.learning_rate") -> None:
    """Raise `NotFinite` if a metric of an update, such as the loss, is a NaN or an infinity. `check_figures` must be
    called before the optimizer step."""
    for name, value in figures.items():
        if not np.isfinite(value):
            cure = f"{AGAIN} and a lower {key}"
            raise NotFinite(
                f"version {version + 1} is not trained, because {name} of batch {version} is {value}; {cure}"
            )


def all_finite(tensor: Tensor) -> bool:
    """Return True if no element of a tensor is a NaN or an infinity. The tensor is read once, without a copy."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    return all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor))
