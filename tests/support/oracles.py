"""Computes the loss of a whole batch for each preset, from the formula of the preset's paper, in plain floats without
tensors.

A batch is a list of rows. The loss of a batch is minimised. Means are over rows that have tokens; group statistics
include all rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tests.support.dual import Dual, clip, exp, least, most

EPSILON = 1e-4


@dataclass(frozen=True)
class Row:
    """One response: the log-probs of its tokens."""

    reward: float
    group: int
    pi: Sequence[Dual]
    mu: Sequence[float]
    proximal: Sequence[float]
    values: Sequence[float] = ()  # the critic's values of the tokens; zero without a critic
    reference: Sequence[float] = ()


Rows = Sequence[Row]
Losses = list[list[Dual]]  # the loss of each token, by row
LONGEST = 8


def in_group(rows: Rows, row: Row) -> list[float]:
    return [other.reward for other in rows if other.group == row.group]


def centred(rows: Rows) -> list[float]:
    return [row.reward - statistics.fmean(in_group(rows, row)) for row in rows]


def normalised(rows: Rows, penalty: Sequence[float] | None = None) -> list[float]:
    """Compute GRPO's advantages: divided by the sample deviation of the group."""
    taken = [
        Row(r.reward - p, r.group, r.pi, r.mu, r.proximal)
        for r, p in zip(rows, penalty or [0.0] * len(rows), strict=True)
    ]
    found = []
    for row in taken:
        others = in_group(taken, row)
        deviation = statistics.stdev(others) if len(others) > 1 else 0.0
        found.append((row.reward - statistics.fmean(others)) / (deviation + EPSILON))
    return found


def whitened(rows: Rows) -> list[float]:
    """Whiten rewards over all tokens of the batch."""
    each = [row.reward for row in rows for _ in row.pi]
    mean, variance = statistics.fmean(each), statistics.variance(each)
    return [(row.reward - mean) / math.sqrt(variance + 1e-8) for row in rows]


def generalized(rows: Rows, gamma: float = 1.0, lam: float = 1.0) -> list[list[float]]:
    """Compute the GAE of each token, then whiten.

    GAE is the discounted sum of later residuals (Schulman et al. 2016, eq. 16).
    """
    found = []
    for row in rows:
        n = len(row.pi)
        values = [*(row.values or [0.0] * n), 0.0]
        surprise = [(row.reward if t == n - 1 else 0.0) + gamma * values[t + 1] - values[t] for t in range(n)]
        found.append([sum((gamma * lam) ** (s - t) * surprise[s] for s in range(t, n)) for t in range(n)])
    each = [a for row in found for a in row]
    mean, deviation = statistics.fmean(each), math.sqrt(statistics.variance(each) + 1e-8)
    return [[(a - mean) / deviation for a in row] for row in found]


def leave_one_out(rows: Rows) -> list[float]:
    found = []
    for i, row in enumerate(rows):
        others = [other.reward for j, other in enumerate(rows) if other.group == row.group and j != i]
        found.append(row.reward - statistics.fmean(others) if others else 0.0)
    return found


def token_mean(losses: Losses) -> Dual:
    each = [loss for row in losses for loss in row]
    return sum(each, Dual(0.0)) / len(each)


def sequence_mean(losses: Losses) -> Dual:
    means = [sum(row, Dual(0.0)) / len(row) for row in losses if row]
    return sum(means, Dual(0.0)) / len(means)


def sequence_sum(losses: Losses) -> Dual:
    sums = [sum(row, Dual(0.0)) for row in losses if row]
    return sum(sums, Dual(0.0)) / len(sums)


def constant(losses: Losses) -> Dual:
    return sequence_sum(losses) / LONGEST


def by_token(rows: Rows, advantages: Sequence[float], loss: Callable[[Dual, float, float, float], Dual]) -> Losses:
    """Apply `loss(log pi, log mu, log pi_p, A)` to each token."""
    return [
        [loss(pi, mu, proximal, a) for pi, mu, proximal in zip(row.pi, row.mu, row.proximal, strict=True)]
        for row, a in zip(rows, advantages, strict=True)
    ]


def held(ratio: Dual, advantage: float, low: float, high: float) -> Dual:
    """Compute PPO's loss, which is minimised."""
    return -least(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)


def ppo(rows: Rows, gamma: float = 1.0, lam: float = 1.0) -> Dual:
    return token_mean(
        [
            [held(exp(pi - mu), a, 0.2, 0.2) for pi, mu, a in zip(row.pi, row.mu, advantages, strict=True)]
            for row, advantages in zip(rows, generalized(rows, gamma, lam), strict=True)
        ]
    )


def reinforce_plus_plus(rows: Rows) -> Dual:
    return token_mean(by_token(rows, whitened(rows), lambda pi, mu, _, a: held(exp(pi - mu), a, 0.2, 0.2)))


def with_divergence(rows: Rows, kind: str, weight: float) -> Dual:
    """Compute GRPO's loss with a penalty for each token's distance from the reference."""

    def price(pi: Dual, reference: float) -> Dual:
        off = pi - reference
        return {"k1": off, "k2": 0.5 * off * off, "k3": exp(-off) - 1 + off}[kind]

    paid = [[price(*pair) for pair in zip(row.pi, row.reference, strict=True)] for row in rows]
    return grpo(rows) + weight * token_mean(paid)


def with_priced_rewards(rows: Rows, weight: float) -> Dual:
    """Compute GRPO's loss, with each response's reward reduced by its sampler's distance from the reference (k1)."""
    paid = [sum(m - r for m, r in zip(row.mu, row.reference, strict=True)) for row in rows]
    return grpo([replace(row, reward=row.reward - weight * p) for row, p in zip(rows, paid, strict=True)])


def grpo(rows: Rows) -> Dual:
    return token_mean(by_token(rows, normalised(rows), lambda pi, mu, _, a: held(exp(pi - mu), a, 0.2, 0.28)))


def dual_clipped(rows: Rows) -> Dual:
    def loss(pi: Dual, mu: float, _: float, a: float) -> Dual:
        gain = -held(exp(pi - mu), a, 0.2, 0.28)
        return -(most(gain, Dual(2.0 * a)) if a < 0 else gain)

    return token_mean(by_token(rows, normalised(rows), loss))


def dr_grpo(rows: Rows) -> Dual:
    return constant(by_token(rows, centred(rows), lambda pi, mu, _, a: held(exp(pi - mu), a, 0.2, 0.2)))


def dapo(rows: Rows) -> Dual:
    """Compute DAPO's loss, with a length penalty that rises to 1 in the last fifth of the largest response length."""
    cache = 0.2 * LONGEST
    penalty = [min(max((len(row.pi) - (LONGEST - cache)) / cache, 0.0), 1.0) for row in rows]
    advantages = normalised(rows, penalty)
    return token_mean(by_token(rows, advantages, lambda pi, mu, _, a: held(exp(pi - mu), a, 0.2, 0.28)))


def change(row: Row) -> Dual:
    """Compute log pi/mu of the whole response."""
    return sum((pi - mu for pi, mu in zip(row.pi, row.mu, strict=True)), Dual(0.0))


def gspo(rows: Rows) -> Dual:
    losses = [
        held(exp(change(row) / len(row.pi)), a, 3e-4, 4e-4)
        for row, a in zip(rows, normalised(rows), strict=True)
        if row.pi
    ]
    return sum(losses, Dual(0.0)) / len(losses)


def decoupled_ppo(rows: Rows) -> Dual:
    def loss(pi: Dual, mu: float, proximal: float, a: float) -> Dual:
        return min(math.exp(proximal - mu), 5.0) * held(exp(pi - proximal), a, 0.2, 0.28)

    return token_mean(by_token(rows, normalised(rows), loss))


def tis(rows: Rows) -> Dual:
    def loss(pi: Dual, mu: float, _: float, a: float) -> Dual:
        return -(min(math.exp(pi.value - mu), 2.0) * a * pi)

    return token_mean(by_token(rows, normalised(rows), loss))


def mis(rows: Rows) -> Dual:
    def loss(pi: Dual, mu: float, _: float, a: float) -> Dual:
        ratio = math.exp(pi.value - mu)
        return -(ratio * a * pi) if 0.5 <= ratio <= 5.0 else Dual(0.0)

    return token_mean(by_token(rows, normalised(rows), loss))


def geometric_mask(rows: Rows) -> Dual:
    losses = by_token(rows, normalised(rows), lambda pi, mu, _, a: held(exp(pi - mu), a, 0.2, 0.28))
    for i, row in enumerate(rows):
        if row.pi and not 0.99 <= math.exp(change(row).value / len(row.pi)) <= 1.01:
            losses[i] = [Dual(0.0)] * len(row.pi)
    return token_mean(losses)


def cispo(rows: Rows) -> Dual:
    def loss(pi: Dual, mu: float, _: float, a: float) -> Dual:
        return -(min(math.exp(pi.value - mu), 1.28) * a * pi)

    return token_mean(by_token(rows, normalised(rows), loss))


def topr(rows: Rows, negative_weight: float = 1.0) -> Dual:
    losses = []
    for row, a in zip(rows, centred(rows), strict=True):
        weight = 1.0 if a > 0 else negative_weight * min(math.exp(change(row).value), 1.0)
        losses.append(-(weight * a * sum(row.pi, Dual(0.0))) if row.pi else None)
    kept = [loss for loss in losses if loss is not None]
    return sum(kept, Dual(0.0)) / len(kept)


def weighted_topr(rows: Rows) -> Dual:
    return topr(rows, 0.5)


def reinforce(rows: Rows) -> Dual:
    return sequence_sum(by_token(rows, [row.reward for row in rows], lambda pi, _, __, a: -(a * pi)))


def rloo(rows: Rows) -> Dual:
    return sequence_sum(by_token(rows, leave_one_out(rows), lambda pi, _, __, a: -(a * pi)))


def kimi(rows: Rows) -> Dual:
    losses = []
    for row, a in zip(rows, centred(rows), strict=True):
        if row.pi:
            losses.append(-(a * sum(row.pi, Dual(0.0))) + 0.05 * change(row) * change(row))
    return sum(losses, Dual(0.0)) / len(losses)


def dppo(rows: Rows) -> Dual:
    def loss(pi: Dual, mu: float, _: float, a: float) -> Dual:
        moved = math.exp(pi.value) - math.exp(mu)
        gone = (a > 0 and moved > 0.2) or (a < 0 and moved < -0.2)
        log_ratio = pi - mu
        return (Dual(0.0) if gone else -(a * exp(log_ratio))) + 1e-3 * log_ratio * log_ratio

    return token_mean(by_token(rows, centred(rows), loss))


def m2po(rows: Rows) -> Dual:
    """Compute M2PO's loss, without the tokens with the largest squared log-ratios: the mean of the other squares is at
    most 0.04.
    """
    squares = sorted((p - m) ** 2 for row in rows for p, m in zip(row.proximal, row.mu, strict=True))
    while squares and statistics.fmean(squares) > 0.04:
        squares.pop()
    limit = squares[-1] if squares else -1.0

    def loss(pi: Dual, mu: float, proximal: float, a: float) -> Dual:
        return -(a * exp(pi - mu)) if (proximal - mu) ** 2 <= limit else Dual(0.0)

    return token_mean(by_token(rows, normalised(rows), loss))


def roll_current(rows: Rows) -> Dual:
    return token_mean(by_token(rows, normalised(rows), lambda pi, _, old, a: held(exp(pi - old), a, 0.2, 0.2)))


def gigpo(rows: Rows) -> Dual:
    """Compute the loss of episodes of one turn, whose states have no names."""
    return token_mean(by_token(rows, normalised(rows), lambda pi, mu, _, a: held(exp(pi - mu), a, 0.2, 0.2)))


ORACLES: dict[str, Callable[[Rows], Dual]] = {
    "ppo": ppo,
    "grpo": grpo,
    "dr-grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "decoupled-ppo": decoupled_ppo,
    "tis": tis,
    "mis": mis,
    "geometric-mask": geometric_mask,
    "cispo": cispo,
    "topr": topr,
    "weighted-topr": weighted_topr,
    "reinforce": reinforce,
    "reinforce++": reinforce_plus_plus,
    "rloo": rloo,
    "kimi": kimi,
    "dppo": dppo,
    "m2po": m2po,
    "roll-current": roll_current,
    "gigpo": gigpo,
    "echo": grpo,  # the observation loss is 0 in episodes without tokens of an environment
}


def gradient(oracle: Callable[[Rows], Dual], rows: Rows) -> list[list[float]]:
    """Return the derivative of the loss with respect to the log-prob of each token."""
    found = []
    for i, row in enumerate(rows):
        slopes = []
        for t in range(len(row.pi)):
            pi = [Dual(p.value, float(s == t)) for s, p in enumerate(row.pi)]
            changed = [*rows[:i], replace(row, pi=pi), *rows[i + 1 :]]
            slopes.append(oracle(changed).slope)
        found.append(slopes)
    return found
