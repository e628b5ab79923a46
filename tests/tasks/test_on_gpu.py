"""Tests without a GPU that the engine does not mix tensors on a GPU with tensors on the CPU: the tests put the model on
torch's "meta" device, whose tensors have no values.

An operation on a "meta" tensor and a CPU tensor raises an error, as with a GPU. Reading a value also raises an error,
so a step runs only until it would read the first token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollflow.storage.model_input import ModelInput
from rollflow.tasks.engines import fixed_shape
from rollflow.tasks.engines.base import GenerationRequest
from rollflow.tasks.engines.fixed_shape import FixedShapeSampler
from tests.support.tiny_policy import make_policy

DEVICE = torch.device("meta")


class _Head:
    """An output head without the test at its start, because this test would read values."""

    def __init__(self, model: Any, *, judged: bool) -> None:
        self._model = model

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.get_output_embeddings()(hidden)
        return logits


@pytest.fixture
def sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FixedShapeSampler:
    """Build a sampler whose model is on the device "meta"."""
    make_policy(tmp_path)
    monkeypatch.setattr(fixed_shape, "find_device", lambda: DEVICE)
    monkeypatch.setattr(fixed_shape, "LMHead", _Head)
    return FixedShapeSampler(tmp_path, torch.float32, 64, ())


def test_prefill_of_the_transformers_engine_stays_on_its_device(sampler: FixedShapeSampler) -> None:
    sampler.add(GenerationRequest("r", ModelInput.of(tuple(range(3, 40))), 5))
    with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta|Cannot copy out of meta"):
        sampler.step(0)


def test_decode_of_the_transformers_engine_stays_on_its_device(sampler: FixedShapeSampler) -> None:
    row = sampler.add(GenerationRequest("r", ModelInput.of(tuple(range(3, 40))), 5))
    row.fed, row.known = 37, [*row.known, 3]
    with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta|Cannot copy out of meta"):
        sampler.step(0)


def test_operation_on_two_devices_raises_an_error() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        torch.zeros(3, device=DEVICE) + torch.zeros(3)
