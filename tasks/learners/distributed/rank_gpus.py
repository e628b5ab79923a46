"""Assigns one GPU to each rank of a learner. The process of a rank sees only its own GPU, which is then the device
"cuda".

The first rank runs in the learner's Ray actor and uses the first of the actor's GPUs.
"""

from __future__ import annotations

import os

import torch

from rollflow.storage.errors import ConfigError
from rollflow.tasks.runtime.node import find_interface

VISIBLE = "CUDA_VISIBLE_DEVICES"  # environment variable that lists the GPUs of a process; CUDA reads it once
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}  # library that adds up tensors over ranks, by device type


def check_gpus(ranks: int) -> None:
    """Check on the first rank, before other ranks start, that this machine has a GPU for each rank.

    Raises:
        ConfigError: this machine has GPUs, but fewer GPUs than there are ranks.
    """
    # Torch must look for GPUs without starting CUDA, because a process that has started CUDA cannot be forked.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    found = torch.cuda.device_count()
    if 0 < found < ranks:
        raise ConfigError(
            f"train.ranks = {ranks}: each rank needs its own GPU, but this machine has only {found} GPUs; set "
            f"train.ranks = {found}"
        )


def take_gpu(rank: int) -> None:
    """Make the GPU of rank `rank` the only GPU that this process sees; do nothing on a machine without GPUs."""
    if torch.cuda.device_count():
        given = os.environ.get(VISIBLE)
        os.environ[VISIBLE] = given.split(",")[rank] if given else str(rank)


def begin_backend(device: torch.device, host: str, *, blocking: bool) -> str:
    """Return the backend of a process group for tensors on `device`, and set the environment variables of the
    backend.

    `begin_backend` must be called just before the process group is created. Members of the process group listen only on
    the network interface with the address `host`. With `blocking`, an NCCL operation that exceeds its time limit raises
    an error; without it, NCCL ends the process.
    """
    name = interface_of(host)
    os.environ |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = str(int(blocking))
    return BACKENDS[device.type]


def interface_of(host: str) -> str:
    """Return this machine's network interface that has the address `host`.

    Raises:
        ConfigError: no interface has the address `host`.
    """
    if (name := find_interface(host)) is None:
        raise ConfigError(
            f"train.multi_node = true: this machine has no network interface with the address {host}, by which "
            "the cluster knows it"
        )
    return name
