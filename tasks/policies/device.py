"""Chooses and sets up the device on which the learner or the transformers engine runs a policy."""

from __future__ import annotations

import os

import torch
from torch import Tensor

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # environment variable that cuBLAS reads


def find_device() -> torch.device:
    """Return the first GPU that is visible to this process, or the CPU if there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def fix_workspace() -> None:
    """Set the size of cuBLAS's workspace before the first use of a GPU, unless the environment variable is set."""
    os.environ.setdefault(WORKSPACE, ":4096:8")


def turn_off_cudnn_attention() -> None:
    """Prevent torch from using cuDNN's attention, which is not deterministic over many keys (see docs/gpu.md)."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from pageable memory of the CPU to `device`, without waiting for earlier work of the device.

    The tensor may be changed as soon as `send` returns.
    """
    return tensor.to(device, non_blocking=True)
