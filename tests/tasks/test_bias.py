"""Tests of the bias of objectives with a known true gradient: corrections reduce it; only exact weights remove it."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.bias import STALENESS, Bandit
from rollflow.tasks.objectives.config import PartsObjective
from rollflow.tasks.objectives.presets import PRESETS, UNBOUNDED

EXACT = PartsObjective.model_validate(
    {
        "kind": "reinforce",
        "ratio": {"level": "sequence"},
        "surrogate": {"positive": [0, UNBOUNDED], "negative": [0, UNBOUNDED]},
    }
)


def preset(kind: str) -> PartsObjective:
    return PartsObjective.model_validate({"kind": kind})


@pytest.mark.parametrize("staleness", STALENESS)
@pytest.mark.parametrize("seed", range(3))
def test_exact_importance_weights_have_no_bias(staleness: float, seed: int) -> None:
    assert Bandit(staleness, seed).found(EXACT).bias < 1e-9


@pytest.mark.parametrize("kind", PRESETS)
def test_on_policy_gradient_is_biased_only_by_sign_weights(kind: str) -> None:
    assert (Bandit(0.0).found(preset(kind)).bias < 1e-9) == (kind != "weighted-topr")


@pytest.mark.parametrize("kind", ["decoupled-ppo", "tis", "mis", "cispo"])
def test_off_policy_corrections_reduce_the_gradient_bias(kind: str) -> None:
    """`roll-current` treats stale samples as fresh, like REINFORCE with a baseline."""
    bandits = [Bandit(0.3, seed) for seed in range(7)]
    corrected, current, plain = (
        [one.found(preset(name)).bias for one in bandits] for name in (kind, "roll-current", "rloo")
    )
    assert current == pytest.approx(plain, rel=1e-9)
    assert statistics.median(current) > 0.2
    assert statistics.median(corrected) < 0.9 * statistics.median(current)
