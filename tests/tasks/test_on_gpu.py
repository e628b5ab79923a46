"""Tensors on a GPU are not mixed with tensors on the CPU: tested on "meta" tensors, which have no values.

An operation on tensors of both devices raises, as it would on a GPU. Reading a value ends the test, so a step gets as
far as the first token that it would read.
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
    """A head without the test at the start, which would read values."""

    def __init__(self, model: Any, *, judged: bool) -> None:
        self._model = model

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.get_output_embeddings()(hidden)
        return logits


@pytest.fixture
def sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FixedShapeSampler:
    """A sampler whose model is on another device."""
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
