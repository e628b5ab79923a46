"""Tests each preset of the objective with extreme inputs: log-probs that are far apart, one token, no token, and
bfloat16.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rollflow.tasks.objectives import build_objective
from rollflow.tasks.objectives.base import MaskedTokens
from rollflow.tasks.objectives.config import PartsObjective
from rollflow.tasks.objectives.presets import PRESETS

FAR = (-1e-9, -1.0, -700.0, -1e4)  # log-probs in nats; float64 overflows just above e^700


def given(logp: list[float], old: list[float], advantage: float, dtype: torch.dtype) -> MaskedTokens:
    """Return tokens in rows of two tokens; if the number of tokens is odd, the last row has one token."""

    def tensor(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    count = len(logp)
    return MaskedTokens(
        logp_M=tensor(logp).requires_grad_(),
        behaviour_M=tensor(old),
        advantage_M=torch.full((count,), advantage, dtype=dtype),
        row_M=torch.arange(count) // 2,
        proximal_M=tensor(old[::-1]),
        kept_M=torch.ones(count, dtype=torch.bool),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", PRESETS)
def test_loss_of_very_different_policies_does_not_overflow(name: str, dtype: torch.dtype) -> None:
    objective = build_objective(PartsObjective(kind=name))
    for logp, old, advantage in itertools.product(FAR, FAR, (1e6, -1e6)):
        tokens = given([logp, logp, -1.0], [old, old, -1.0], advantage, dtype)
        loss_M = objective.loss(tokens).loss_M
        [slope_M] = torch.autograd.grad(loss_M.sum(), tokens.logp_M)
        assert loss_M.dtype == slope_M.dtype == dtype
        assert bool(loss_M.isfinite().all() & slope_M.isfinite().all())


@pytest.mark.parametrize("name", PRESETS)
def test_micro_batch_may_have_no_tokens(name: str) -> None:
    objective = build_objective(PartsObjective(kind=name))
    tokens = given([], [], 1.0, torch.float64)
    found = objective.loss(tokens)
    found.loss_M.sum().backward()  # type: ignore[no-untyped-call]
    assert (
        found.loss_M.shape == found.clipped_M.shape == objective.keep(tokens.behaviour_M, tokens.logp_M).shape == (0,)
    )


@pytest.mark.parametrize("name", PRESETS)
def test_ratio_of_a_single_token_is_the_same_at_every_level(name: str) -> None:
    """In a row of one token, the sum and the mean over the row equal the token's own value."""
    part = PartsObjective(kind=name)
    tokens = given([-0.5], [-0.7], -1.0, torch.float64)
    losses = {
        build_objective(part.model_copy(update={"ratio": part.ratio.model_copy(update={"level": level})}))
        .loss(tokens)
        .loss_M.item()
        for level in ("token", "sequence", "geometric")
    }
    assert len(losses) == 1


def test_second_moment_correction_may_mask_every_token() -> None:
    """The squared log-ratios 0.09 and 0.25 are both above the bound 0.04, so every token is masked and all gradients
    are zero.
    """
    objective = build_objective(PartsObjective(kind="m2po"))
    proximal, behaviour = torch.tensor([-1.0, -1.0]), torch.tensor([-1.3, -0.5])
    kept = objective.keep(proximal, behaviour)
    assert kept.tolist() == [False, False]
    tokens = replace(given([-1.0, -1.0], [-1.3, -0.5], 1.0, torch.float32), kept_M=kept)
    found = objective.loss(tokens)
    [slope_M] = torch.autograd.grad(found.loss_M.sum(), tokens.logp_M)
    assert found.loss_M.tolist() == slope_M.tolist() == [0.0, 0.0]
    assert found.corrected_M is not None
    assert found.corrected_M.tolist() == [True, True]
    # the squared log-ratio 0.01 is below 0.04
    assert objective.keep(proximal, torch.tensor([-1.1, -0.5])).tolist() == [True, False]
