"""The GPU that a rank sees; the number of GPUs is simulated."""

from __future__ import annotations

import os

import pytest
import torch

from rollflow.tasks.learners.distributed.rank_gpus import VISIBLE, begin_backend, check_gpus, take_gpu


@pytest.mark.parametrize(("given", "rank", "seen"), [(None, 2, "2"), ("4,6,7", 1, "6"), ("GPU-a,GPU-b", 0, "GPU-a")])
def test_learner_rank_sees_only_its_own_gpu(
    given: str | None, rank: int, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv(VISIBLE, raising=False)
    if given is not None:
        monkeypatch.setenv(VISIBLE, given)
    take_gpu(rank)
    assert os.environ[VISIBLE] == seen


def test_environment_variables_are_unchanged_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv(VISIBLE, raising=False)
    check_gpus(2)
    take_gpu(1)
    assert VISIBLE not in os.environ


def test_communication_backend_of_ranks_fits_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert begin_backend(torch.device("cpu"), "127.0.0.1", blocking=False) == "gloo"
    assert begin_backend(torch.device("cuda"), "127.0.0.1", blocking=True) == "nccl"
    assert os.environ["NCCL_SOCKET_IFNAME"] == os.environ["GLOO_SOCKET_IFNAME"] == "lo"  # loopback
