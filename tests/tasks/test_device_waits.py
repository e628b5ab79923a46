"""Tests that an update on a GPU reads no values between its micro-batches, because each read waits for the GPU.

The tests run on the CPU, where reads can be counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollflow.tasks.learners.config import TorchTrain
from rollflow.tasks.learners.diagnostics import Diagnostics
from rollflow.tasks.learners.forward import token_logprobs
from rollflow.tasks.learners.torch_learner import TorchLearner, load_model
from rollflow.tasks.objectives.base import MaskedTokens, TokenLoss
from rollflow.tasks.policies.device import send
from rollflow.testing.learners import batch
from tests.support.tiny_policy import make_policy, make_weights


class Reads(TorchDispatchMode):
    """Counts values that are read from tensors, and passes through the model. Transformers reads one value per pass."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.passes = self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        self.passes += func is torch.ops.aten.embedding.default
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(make_policy(tmp_path_factory.mktemp("policy")), seed=1)


def watch_step(folder: Path, micro_tokens: int) -> Reads:
    config = TorchTrain(warmup_versions=0, micro_tokens=micro_tokens, share_prefixes="none")
    learner = TorchLearner(
        load_model(folder, "bfloat16", trained=True), config, temperature=1.0, versions=9, longest=9, seed=0
    )
    with Reads() as seen:
        learner.step(batch(0), 0)
    return seen


def test_device_reads_do_not_grow_with_the_micro_batches(folder: Path) -> None:
    few, many = watch_step(folder, 10**6), watch_step(folder, 1)
    assert many.passes > 2 * few.passes > 0, "the batch has not been split"
    assert many.reads - many.passes == few.reads - few.passes


def test_device_reads_do_not_grow_with_the_chunks_of_logits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = watch_step(folder, 10**6)
    monkeypatch.setattr(token_logprobs, "LOGITS_BYTES", 4 * 320)  # one token at a time
    chunked = watch_step(folder, 10**6)
    assert chunked.calls > 2 * whole.calls, "the head has not been split"
    assert chunked.reads == whole.reads


def test_diagnostics_stay_on_the_device_until_read() -> None:
    one_M = torch.zeros(3, device="meta")
    tokens = MaskedTokens(
        logp_M=one_M, behaviour_M=one_M, advantage_M=one_M, row_M=one_M.long(), entropy_M=one_M, reference_M=one_M
    )
    Diagnostics(0).add(tokens, TokenLoss(one_M, one_M.bool()), one_M.int())  # would fail if it read a value


def test_tensor_sent_to_the_device_arrives_there() -> None:
    assert send(torch.zeros(2), torch.device("meta")).device.type == "meta"
