"""Advantages of randomly drawn tokens against the paper's sum, written out (Schulman et al. 2016, eq. 11 and 16).

Rows contain tokens of an environment between the policy's tokens, or no tokens of the policy. KL penalties, gamma and
lambda also take their extreme values. The oracle uses plain Python floats.
"""

from __future__ import annotations

import math
from itertools import pairwise, product
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.records import StopReason, Trajectory
from rollflow.tasks.learners.forward.critic import value_loss
from rollflow.tasks.learners.forward.pre_update import compute_targets
from rollflow.tasks.objectives.advantage_config import Advantage
from rollflow.tasks.objectives.config import Penalties
from rollflow.tasks.objectives.penalties import adapt_weight
from rollflow.tasks.objectives.rows import BatchRows
from rollflow.testing.learners import batch_of

Row = tuple[
    list[bool], float, StopReason
]  # for each token after the prompt, True if the policy sampled it; reward; ending
NUMBER = st.integers(-16, 16).map(lambda quarters: quarters / 4)
ROWS = st.tuples(st.lists(st.booleans(), max_size=7), NUMBER, st.sampled_from([StopReason.STOP, StopReason.LENGTH]))
UNIT = st.sampled_from([0.0, 1.0, 0.95]) | st.floats(0.01, 1)


def data_of(rows: list[Row]) -> BatchRows:
    made = []
    for mask, reward, ending in rows:
        whole = (False, False, *mask)
        quiet = (0.0,) * len(whole)
        versions = tuple(0 if chosen else -1 for chosen in whole)
        made.append(Trajectory(0, 0, (5,) * len(whole), whole, quiet, versions, reward, "", ending))
    return BatchRows.of(batch_of(made))


def expected(part: Advantage, row: Row, values: list[float], prices: list[float]) -> list[float]:
    """Return A_t, the sum over l of (gamma lambda)^l d_t+l, over the tokens that the policy sampled."""
    last = len(values) - 1
    paid = [(row[1] if t == last else 0.0) - prices[t] for t in range(len(values))]
    after = [*values[1:], 0.0]
    surprise = [paid[t] + part.gamma * after[t] - values[t] for t in range(len(values))]
    decay = part.gamma * part.gae_lambda
    return [sum(decay ** (u - t) * surprise[u] for u in range(t, len(values))) for t in range(len(values))]


def whitened(found: list[float]) -> list[float]:
    if len(set(found)) < 2:
        return [0.0] * len(found)
    mean = sum(found) / len(found)
    deviation = math.sqrt(sum((one - mean) ** 2 for one in found) / (len(found) - 1))
    return [(one - mean) / deviation for one in found]


@given(
    rows=st.lists(ROWS, min_size=1, max_size=5),
    gamma=st.just(1.0) | st.floats(1e-3, 1),
    gae_lambda=UNIT,
    scale=st.sampled_from(["none", "whiten"]),
    signs=st.tuples(UNIT, UNIT),
    draw=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_token_advantages_equal_the_formula_of_the_gae_paper(
    rows: list[Row], gamma: float, gae_lambda: float, scale: str, signs: tuple[float, float], draw: st.DataObject
) -> None:
    part = Advantage(baseline="critic", scale=scale, gamma=gamma, gae_lambda=gae_lambda)  # type: ignore[arg-type]
    part = part.model_copy(update={"positive_weight": signs[0], "negative_weight": signs[1]})
    data = data_of(rows)
    values, prices = (
        [draw.draw(st.lists(NUMBER, min_size=n, max_size=n)) for n in data.masked_tokens.tolist()] for _ in range(2)
    )
    plain = [expected(part, *one) for one in zip(rows, values, prices, strict=True)]
    flat, value = ([x for one in many for x in one] for many in (plain, values))
    price_B = torch.tensor([x for one in prices for x in one])
    judged = compute_targets(part, data, 7, price_B=price_B, values_B=torch.tensor(value))
    assert judged.returns_B is not None
    assert judged.returns_B.tolist() == pytest.approx([a + v for a, v in zip(flat, value, strict=True)], abs=1e-5)
    if scale == "whiten" and (max(flat, default=0) - min(flat, default=0)) < 1e-2:
        return  # the code keeps the deviation above zero
    wanted = whitened(flat) if scale == "whiten" else flat
    wanted = [one * (signs[0] if one > 0 else signs[1]) for one in wanted]
    assert judged.advantage_B.tolist() == pytest.approx(wanted, abs=2e-3 if scale == "whiten" else 1e-5)
    has = [any(x != 0 for x in judged.advantage_B[a:b].tolist()) for a, b in pairwise(data.starts)]
    assert judged.signal_R.tolist() == has


@given(value=NUMBER, old=NUMBER, target=NUMBER, clip=st.floats(1e-3, 8))
@settings(max_examples=60, deadline=None)
def test_clipped_value_loss_matches_hand_calculations(value: float, old: float, target: float, clip: float) -> None:
    """The loss is never less than the plain square, and equals it within the clip range. Outside of the range and
    beyond the target, the loss is constant.
    """
    given = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    wide = [torch.tensor(x, dtype=torch.float64) for x in (old, target)]
    loss = value_loss(given, *wide, clip)
    loss.backward()  # type: ignore[no-untyped-call]
    plain = (value - target) ** 2 / 2
    held = old + clip if value > old + clip else old - clip if value < old - clip else value
    assert loss.item() == pytest.approx(max(plain, (held - target) ** 2 / 2), abs=1e-9)
    if abs(held - target) > abs(value - target) + 1e-6:
        assert given.grad == 0.0
    elif abs(held - target) < abs(value - target) - 1e-6 or held == value:
        assert given.grad is not None
        assert given.grad.item() == pytest.approx(value - target, abs=1e-9)


@given(
    weight=st.floats(1e-6, 1e3),
    target=st.floats(1e-6, 10),
    gain=st.floats(1e-3, 1),
    seen=st.lists(st.floats(0, 1e9), max_size=20),
)
@settings(max_examples=60, deadline=None)
def test_kl_weight_changes_in_proportion_to_the_clipped_error(
    weight: float, target: float, gain: float, seen: list[float]
) -> None:
    """Ziegler et al. 2019: K_beta times the clipped proportional error."""
    part = Penalties(kl_to="reference", kl_weight=weight, kl_target=target, kl_gain=gain)
    for divergence in seen:
        after = adapt_weight(part, weight, divergence)
        error = (divergence - target) / target
        clipped = 0.2 if error > 0.2 else -0.2 if error < -0.2 else error
        assert after == pytest.approx(weight * (1 + gain * clipped), rel=1e-12)
        assert after > 0
        weight = after


def test_advantages_are_computed_in_float64() -> None:
    """No float32 holds the mean of these rewards exactly; a recorded run keeps its float32 advantages."""
    part = Advantage(baseline="group", scale="none")
    data = data_of([([True], reward, StopReason.STOP) for reward in (1e8, 1e8 + 8, 3.0)])
    exact = [value - fmean([1e8, 1e8 + 8, 3.0]) for value in (1e8, 1e8 + 8, 3.0)]
    found, recorded = compute_targets(part, data, 7), compute_targets(part, data, 7, dtype=torch.float32)
    assert found.advantage_B.tolist() == torch.tensor(exact).tolist()
    assert found.advantage_B.tolist() != recorded.advantage_B.tolist()


@pytest.mark.parametrize("large", [1e20, -3e38])
@pytest.mark.parametrize(
    ("baseline", "scale"),
    [
        *product(["group", "leave-one-out"], ["group", "batch", "whiten"]),
        *product(["batch"], ["batch", "whiten"]),
    ],
)
def test_rewards_near_the_float32_limit_get_right_advantages(baseline: str, scale: str, large: float) -> None:
    """The square of a large reward overflows float32. Advantages divided by the deviation do not depend on the size."""
    part = Advantage(baseline=baseline, scale=scale)  # type: ignore[arg-type]
    found = []
    for reward in (large, math.copysign(1e6, large)):
        data = data_of([([True] * n, reward * (n == 2), StopReason.STOP) for n in (1, 2, 3)])
        found.append(compute_targets(part, data, 7, price_B=torch.full((6,), 0.25)).advantage_B.tolist())
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert any(found[0])
