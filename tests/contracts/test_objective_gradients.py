"""Tests that gradients equal the closed forms in papers, and that the docs page on objectives is complete.

The module `oracles.py` defines losses and differentiates them automatically. The gradients in this module were derived
by hand. G is the gradient of the loss with respect to log pi of a token, n the number of tokens of the token's row, N
the number of tokens of all rows, and R the number of rows that have tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from rollflow.tasks.objectives.config import PartsObjective
from rollflow.tasks.objectives.presets import PRESETS
from tests.contracts.test_objectives import composed, drawn
from tests.support.oracles import LONGEST, Row, Rows

PAGE = Path(__file__).parents[2] / "docs" / "objectives.md"


def group_of(rows: Rows, row: Row) -> list[float]:
    return [other.reward for other in rows if other.group == row.group]


def centred(rows: Rows, row: Row) -> float:
    group = group_of(rows, row)
    return row.reward - sum(group) / len(group)


def normalised(rows: Rows, row: Row) -> float:
    """Return GRPO's advantage of a row.

    The variance of the rewards of a group of n rows is (the sum of squared rewards - n mean^2) / (n - 1).
    """
    group = group_of(rows, row)
    mean, count = sum(group) / len(group), len(group)
    variance = max(sum(r * r for r in group) - count * mean * mean, 0.0) / max(count - 1, 1)
    return 0.0 if len(set(group)) == 1 else (row.reward - mean) / (math.sqrt(variance) + 1e-4)


def moved(row: Row) -> float:
    """Return log(pi/mu) of the whole response."""
    return math.fsum(p.value for p in row.pi) - math.fsum(row.mu)


def token_mean(rows: Rows) -> int:
    return sum(len(row.pi) for row in rows)


def with_tokens(rows: Rows) -> int:
    return sum(bool(row.pi) for row in rows)


def rises(ratio: float, advantage: float, low: float, high: float) -> bool:
    """Return True if the minimum in PPO's loss is the unclipped term, which has a gradient."""
    return ratio < 1 + high if advantage > 0 else ratio > 1 - low


def gspo(rows: Rows, row: Row, _: int) -> float:
    """Return the gradient of GSPO, G = -s A / (n R), which is the same for every token of a row.

    The ratio s is (pi/mu of the response)^(1/n) (Zheng et al. 2025, section 4).
    """
    s, a = math.exp(moved(row) / len(row.pi)), normalised(rows, row)
    return -s * a / len(row.pi) / with_tokens(rows) if rises(s, a, 3e-4, 4e-4) else 0.0


def kimi(rows: Rows, row: Row, _: int) -> float:
    """Return the gradient of Kimi k1.5, G = (-(reward - mean reward) + tau log(pi/mu of the response)) / R.

    The weight tau is 0.1 (Kimi Team 2025).
    """
    return (-centred(rows, row) + 0.1 * moved(row)) / with_tokens(rows)


def topr(rows: Rows, row: Row, _: int) -> float:
    """Return the gradient of TOPR (Le Roux et al. 2025).

    The gradient is -A / R for answers with A > 0, and -min(pi/mu of the response, 1) A / R for other answers.
    """
    a = centred(rows, row)
    return -(1.0 if a > 0 else min(1.0, math.exp(moved(row)))) * a / with_tokens(rows)


def decoupled_ppo(rows: Rows, row: Row, t: int) -> float:
    """Return the gradient of decoupled PPO: G = -min(pi_p/mu, 5) (pi/pi_p) A / N if PPO's minimum has a gradient.

    If pi_p/mu is below 5, the product of both ratios is pi/mu.
    """
    a, pi, mu, proximal = normalised(rows, row), row.pi[t].value, row.mu[t], row.proximal[t]
    if not rises(math.exp(pi - proximal), a, 0.2, 0.28):
        return 0.0
    return -min(math.exp(pi - mu), 5 * math.exp(pi - proximal)) * a / token_mean(rows)


def dr_grpo(rows: Rows, row: Row, t: int) -> float:
    """Return the gradient of Dr. GRPO, G = -(pi/mu) A / (R x the largest length of a response)."""
    a, ratio = centred(rows, row), math.exp(row.pi[t].value - row.mu[t])
    return -ratio * a / with_tokens(rows) / LONGEST if rises(ratio, a, 0.2, 0.2) else 0.0


def dppo(rows: Rows, row: Row, t: int) -> float:
    """Return the gradient of DPPO, G = (-(pi/mu) A 1[|pi - mu| <= 0.2 on A's side] + 2e-3 log(pi/mu)) / N."""
    a, pi, mu = centred(rows, row), row.pi[t].value, row.mu[t]
    kept = math.copysign(1.0, a) * (math.exp(pi) - math.exp(mu)) <= 0.2
    return (-math.exp(pi - mu) * a * kept + 2e-3 * (pi - mu)) / token_mean(rows)


def weighted(low: float, high: float, outside: float | None = None) -> Callable[[Rows, Row, int], float]:
    """Return the gradient G = -w A / N, where the weight w is pi/mu, clamped or dropped."""

    def slope(rows: Rows, row: Row, t: int) -> float:
        ratio = math.exp(row.pi[t].value - row.mu[t])
        inside = low <= ratio <= high
        weight = ratio if inside else (min(max(ratio, low), high) if outside is None else outside)
        return -weight * normalised(rows, row) / token_mean(rows)

    return slope


FORMS: Mapping[str, Callable[[Rows, Row, int], float]] = {
    "gspo": gspo,
    "kimi": kimi,
    "topr": topr,
    "decoupled-ppo": decoupled_ppo,
    "dr-grpo": dr_grpo,
    "dppo": dppo,
    "tis": weighted(0.0, 2.0),
    "cispo": weighted(0.0, 1.28),
    "mis": weighted(0.5, 5.0, 0.0),
}


@pytest.mark.parametrize("staleness", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("name", FORMS)
def test_gradient_equals_its_closed_form(name: str, staleness: float) -> None:
    rows = drawn(11, staleness)
    expected = [FORMS[name](rows, row, t) for row in rows for t in range(len(row.pi))]
    _, found = composed(PartsObjective(kind=name), rows)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert any(found) or name == "gspo"


def cells(heading: str) -> dict[str, str]:
    """Return the second column of the first table below a heading of the docs page, by preset."""
    blocks = PAGE.read_text().split(f"## {heading}\n")[1].split("\n\n")
    table = next(block.strip() for block in blocks if block.strip().startswith("|"))
    rows = [[cell.strip(" `") for cell in line.split("|")] for line in table.splitlines()]
    return {name: beside for _, name, beside, *_ in rows if name in PRESETS}


def test_docs_have_formula_and_bias_of_each_preset() -> None:
    formulas, biases = cells("Presets"), cells("Bias on stale samples")
    assert formulas.keys() == biases.keys() == PRESETS.keys()
    assert not any(formula.count(" / ") == 2 for formula in formulas.values())
    assert all(bias.count("/") == 2 for bias in biases.values())
