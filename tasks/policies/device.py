"""The device on which a process of the learner or of the transformers engine runs a policy."""

from __future__ import annotations

import os

import torch
from torch import Tensor

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # environment variable that cuBLAS reads


def find_device() -> torch.device:
    """Return the first GPU that this process sees, or the CPU. Ray shows an actor only the actor's own GPUs."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def fix_workspace() -> None:
    """Set the size of cuBLAS's workspace, unless the environment sets it. Call this before a device is used."""
    os.environ.setdefault(WORKSPACE, ":4096:8")


def turn_off_cudnn_attention() -> None:
    """Keep torch from choosing cuDNN's attention on a GPU, in this process.

    Given the same data twice, cuDNN's attention over many keys can return different bits: see docs/gpu.md.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the CPU's (pageable) memory to `device`, without waiting for the device's earlier work.

    The driver has read the tensor when `send` returns. To copy a tensor from a device, use `cpu()`, which waits.
    """
    return tensor.to(device, non_blocking=True)
