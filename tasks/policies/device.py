"""The device on which this process runs a policy; for the learner and the transformers engine."""

from __future__ import annotations

import os

import torch
from torch import Tensor

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # read by cuBLAS when a thread first uses it


def find_device() -> torch.device:
    """Return the first GPU that this process sees, or the processor. Ray shows an actor its own GPUs only."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def fix_workspace() -> None:
    """Give cuBLAS a workspace of a fixed size, unless the environment names one; call it before a device is used."""
    os.environ.setdefault(WORKSPACE, ":4096:8")


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the CPU's (pageable) memory to `device`, without waiting for the device's earlier work.

    The driver has read the tensor when this returns. Copies from the device must wait: use `cpu()` for them.
    """
    return tensor.to(device, non_blocking=True)
