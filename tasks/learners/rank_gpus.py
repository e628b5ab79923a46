"""GPUs of a learner's ranks: each has one, and sees no other.

So "cuda" is a rank's own in every thread of it. The first rank runs in the learner's actor, which Ray gives as many
GPUs as there are ranks: its own is the first of them.
"""

from __future__ import annotations

import os

import psutil
import torch

from rollflow.storage.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"  # read by CUDA at its first use in a process
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}  # what adds up over ranks, by where the numbers are


def check_gpus(ranks: int) -> None:
    """Of the first rank, before others are started.

    Raises:
        ConfigError: there are GPUs here, but fewer than ranks.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # ranks are forked: to ask must not start CUDA
    found = torch.cuda.device_count()
    if 0 < found < ranks:
        raise ConfigError(f"train.ranks = {ranks}: each has a GPU of its own, and here are {found}; set it to {found}")


def take_gpu(rank: int) -> None:
    """This process has the GPU of a rank from here on, where there are any."""
    if torch.cuda.device_count():
        given = os.environ.get(VISIBLE)
        os.environ[VISIBLE] = given.split(",")[rank] if given else str(rank)


def begin_backend(device: torch.device, host: str, *, blocking: bool) -> str:
    """What a group of ranks for numbers on `device` is made of; to be called just before it is made.

    Its members listen on the interface of `host` alone. With `blocking`, whoever waits for the others is told when they
    do not come in time; without, NCCL ends the process.
    """
    name = interface_of(host)
    os.environ |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = str(int(blocking))
    return BACKENDS[device.type]


def interface_of(host: str) -> str:
    """This machine's network interface with the address `host`.

    Raises:
        ConfigError: it has none.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return str(name)
    raise ConfigError(f"train.spread = true: this machine has no network interface with its own address {host}")
