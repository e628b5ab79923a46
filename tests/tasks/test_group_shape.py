"""Tests batches of the transformers engine with the shape for a GPU: their number of rows, and equal responses in any
batch.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import StopReason
from rollflow.tasks.engines import fixed_shape
from rollflow.tasks.engines.base import Generation, GenerationRequest
from rollflow.tasks.engines.fixed_shape import ON_CPU, ON_GPU, AttentionRows, FixedShapeSampler, fit_rows
from tests.support.tiny_policy import make_policy, make_weights

REQUESTS = [
    # prompts that are shorter than a chunk of 64 tokens, longer, or equally long; attention over 64, 128 and 256 keys
    GenerationRequest(f"r{n}", ModelInput.of(tuple(3 + (7 * n + 3 * k) % 300 for k in range(length))), 6, 1.0, seed=n)
    for n, length in enumerate((1, 20, 63, 64, 65, 128, 150))
]


@pytest.fixture
def sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FixedShapeSampler:
    """Build a sampler on the CPU with the batch shape for a GPU."""
    make_policy(tmp_path)
    make_weights(tmp_path, seed=0)
    monkeypatch.setattr(fixed_shape, "ON_CPU", ON_GPU)
    sampler = FixedShapeSampler(tmp_path, torch.float32, 256, ())
    sampler.load(tmp_path)
    return sampler


def run_all(sampler: FixedShapeSampler, requests: list[GenerationRequest]) -> dict[str, Generation]:
    for request in requests:
        sampler.add(request)
    ended: list[Generation] = []
    while sampler.busy:
        ended += sampler.step(0)
    return {generation.id: generation for generation in ended}


def test_fixed_batch_shape_gives_same_responses_in_any_batch(sampler: FixedShapeSampler) -> None:
    together = run_all(sampler, REQUESTS)
    assert {generation.ending for generation in together.values()} == {StopReason.LENGTH}
    for request in REQUESTS:
        assert run_all(sampler, [request]) == {request.id: together[request.id]}


@pytest.mark.parametrize(("row_bytes", "rows"), [(1, 256), (2**24, 256), (2**24 + 1, 128), (2**27, 32), (2**40, 16)])
def test_fixed_batch_shape_has_fewer_rows_for_long_requests(row_bytes: int, rows: int) -> None:
    assert fit_rows(ON_GPU, row_bytes) == rows


def test_fixed_batch_shape_on_a_cpu_has_64_rows(sampler: FixedShapeSampler) -> None:
    """The number of rows does not depend on the size of a row, because recorded runs are reproduced only with 64
    rows.
    """
    group = AttentionRows(sampler._config, 64, torch.float32, torch.device("meta"), ON_CPU)
    assert len(group.rows) == 64
