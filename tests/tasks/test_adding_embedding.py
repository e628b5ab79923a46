"""Tests that the embedding's in-place gradient equals autograd's bit for bit, without a second gradient in memory."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rollflow.tasks.policies import adding_embedding
from rollflow.tasks.policies.adding_embedding import AddingEmbedding

VOCABULARY, HIDDEN = 40, 8


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adding_embedding, "LEAST_BYTES", 0)


def of(embedding: nn.Module) -> AddingEmbedding:
    return AddingEmbedding(SimpleNamespace(get_input_embeddings=lambda: embedding))


def gradient(*, adds: bool, dtype: torch.dtype, padding: int | None) -> torch.Tensor:
    """Return the gradient of three micro-batches; tokens repeat within each and across them."""
    torch.manual_seed(0)
    embedding = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=padding).to(dtype)
    heard: list[int] = []
    embedding.weight.register_post_accumulate_grad_hook(lambda _: heard.append(1))
    for _ in range(3):
        ids, slope = torch.randint(0, 12, (2, 11)), torch.randn(2, 11, HIDDEN).to(dtype)
        with of(embedding).add_in_place() if adds else nullcontext():
            found = embedding(ids)
        found.backward(slope)
    assert len(heard) == (0 if adds else 3)
    assert embedding.weight.grad is not None
    return embedding.weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("padding", [None, 3, 30])
def test_embedding_gradient_equals_the_gradient_of_autograd(dtype: torch.dtype, padding: int | None) -> None:
    own, theirs = (gradient(adds=adds, dtype=dtype, padding=padding) for adds in (True, False))
    assert own.abs().sum() > 0
    assert torch.equal(own, theirs)


def test_tied_weight_gets_gradients_of_embedding_and_output() -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(VOCABULARY, HIDDEN)
    ids = torch.tensor([[1, 2, 2]])

    def gradient() -> torch.Tensor:
        found, embedding.weight.grad = embedding.weight.grad, None
        assert found is not None
        return found

    (embedding(ids) @ embedding.weight.t()).square().sum().backward()
    whole = gradient()
    with of(embedding).add_in_place():
        (embedding(ids) @ embedding.weight.t()).square().sum().backward()
    torch.testing.assert_close(gradient(), whole)


def test_embedding_is_restored_after_an_error_in_the_block() -> None:
    embedding = nn.Embedding(VOCABULARY, HIDDEN)
    with suppress(ZeroDivisionError), of(embedding).add_in_place():
        raise ZeroDivisionError
    assert "forward" not in vars(embedding)


class _Scaled(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2.0


def _with_a_hook(embedding: nn.Embedding) -> nn.Embedding:
    embedding.forward = lambda input: nn.functional.embedding(input, embedding.weight) * 2.0  # type: ignore[method-assign]
    return embedding


@pytest.mark.parametrize(
    "embedding",
    [
        _Scaled(VOCABULARY, HIDDEN),
        _with_a_hook(nn.Embedding(VOCABULARY, HIDDEN)),
        nn.Embedding(VOCABULARY, HIDDEN, scale_grad_by_freq=True),
        nn.Embedding(VOCABULARY, HIDDEN, max_norm=1.0),
    ],
)
def test_embedding_with_special_options_uses_autograd(embedding: Any) -> None:
    heard: list[int] = []
    embedding.weight.register_post_accumulate_grad_hook(lambda _: heard.append(1))
    with of(embedding).add_in_place():
        embedding(torch.tensor([1])).sum().backward()
    assert heard == [1]


def test_model_without_a_known_embedding_is_accepted() -> None:
    def unknown() -> None:
        raise NotImplementedError

    with AddingEmbedding(SimpleNamespace(get_input_embeddings=unknown)).add_in_place():
        pass


def test_frozen_embedding_gets_no_gradient() -> None:
    embedding = nn.Embedding(VOCABULARY, HIDDEN).requires_grad_(False)
    with of(embedding).add_in_place():
        assert not embedding(torch.tensor([1])).requires_grad
    assert embedding.weight.grad is None


def test_autograd_of_the_embedding_is_restored_after_the_block() -> None:
    embedding = nn.Embedding(VOCABULARY, HIDDEN)
    with of(embedding).add_in_place():
        pass
    assert "forward" not in vars(embedding)
    embedding(torch.tensor([1])).sum().backward()
    assert embedding.weight.grad is not None
