"""Tests of the diagnostics of an update against hand calculations, for all tokens and by the age of their version."""

from __future__ import annotations

import math

import pytest
import torch

from rollflow.tasks.learners.diagnostics import OLDEST, Diagnostics
from rollflow.tasks.objectives.base import MaskedTokens, TokenLoss

F64 = torch.float64


def added(seen: Diagnostics, ratios: list[float], versions: list[int], clipped: list[bool], signs: list[float]) -> None:
    behaviour_M = torch.full((len(ratios),), math.log(0.1), dtype=F64)
    logp_M = behaviour_M + torch.tensor(ratios, dtype=F64).log()
    tokens = MaskedTokens(
        logp_M=logp_M.requires_grad_(),
        behaviour_M=behaviour_M,
        advantage_M=torch.tensor(signs, dtype=F64),
        row_M=torch.arange(len(ratios)),
        entropy_M=torch.arange(1.0, 1 + len(ratios), dtype=F64),
        reference_M=logp_M.detach() + math.log(2),
    )
    corrected_M = torch.tensor(versions) == 5
    loss = TokenLoss(torch.zeros(len(ratios), dtype=F64), torch.tensor(clipped), corrected_M)
    seen.add(tokens, loss, torch.tensor(versions, dtype=torch.int32))


def test_training_diagnostics_match_a_hand_calculation() -> None:
    """Version 7 is trained on tokens of versions 7, 5 and 7, in two micro-batches."""
    seen = Diagnostics(7)
    added(seen, [1.0, 2.0], [7, 5], [False, True], [1.0, 1.0])
    added(seen, [0.5], [7], [True], [-1.0])
    found = seen.metrics(entropy=True)
    assert found["ratio_mean"] == pytest.approx(3.5 / 3)
    assert found["ratio_max"] == pytest.approx(2.0)
    assert found["effective_samples"] == pytest.approx(3.5**2 / (3 * 5.25))
    assert (found["ratio_p1"], found["ratio_p99"]) == pytest.approx((0.51, 1.98))  # between the first two, the last two
    assert found["corrected"] == pytest.approx(1 / 3)
    assert (found["corrected_age_0"], found["corrected_age_2"]) == (0.0, 1.0)
    assert found["kl_reference"] == pytest.approx(1 - math.log(2))  # pi/reference is 1/2
    assert found["clipped_up"] == found["clipped_down"] == pytest.approx(1 / 3)
    log = math.log(2)
    assert found["ratio_distance"] == pytest.approx(2 * log / 3)
    assert found["kl_behaviour"] == pytest.approx((0 + (1 - log) + (-0.5 + log)) / 3)
    assert found["entropy"] == pytest.approx((1 + 2 + 1) / 3)
    assert found["ratio_mean_age_0"] == pytest.approx(0.75)
    assert (found["ratio_mean_age_2"], found["effective_samples_age_2"]) == pytest.approx((2.0, 1.0))
    assert (found["clipped_up_age_2"], found["clipped_down_age_2"]) == (1.0, 0.0)
    assert "ratio_mean_age_1" not in found
    assert found["engine_gap"] == pytest.approx(log / 2)


def test_diagnostics_of_the_oldest_tokens_share_one_metric() -> None:
    seen = Diagnostics(9)
    added(seen, [1.0, 3.0, 2.0], [0, 3, 5], [False] * 3, [1.0] * 3)
    seen.updates += 1
    added(seen, [4.0], [9], [False], [1.0])
    found = seen.metrics(entropy=False)
    assert found[f"ratio_mean_age_{OLDEST}"] == pytest.approx(2.0)
    assert {name for name in found if name.startswith("ratio_mean")} == {
        "ratio_mean",
        "ratio_mean_age_0",
        f"ratio_mean_age_{OLDEST}",
    }
    assert "engine_gap" not in found
    assert "entropy" not in found


def test_optimizer_step_without_tokens_has_no_diagnostics() -> None:
    assert Diagnostics(0).metrics(entropy=True) == {}
