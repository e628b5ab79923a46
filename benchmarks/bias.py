"""Computes the bias and the spread of each objective's gradient on stale samples, against a known true gradient.

    python -m benchmarks.bias [--json FILE]

The policy generates `LENGTH` tokens out of `TOKENS`; each token selects the row of logits for the next token. Every
response has a fixed reward. There are few responses, so all expectations are exact sums: the true gradient of the mean
reward under the policy being trained, and the expected gradient of an objective's loss over samples of a behaviour
policy whose log-probs differ by `staleness` nats per token. Each value is the median over `BANDITS` problems.

The objectives are those that rollflow ships. To make presets comparable, the baseline is the exact mean reward (none
for `reinforce`), no preset divides by a standard deviation, and losses are summed over a response. So presets differ
only in ratio, surrogate, correction, penalties, and the weights of positive and negative advantages. The proximal
policy is the policy being trained, as with one update per version. "bias" is the distance of the mean gradient from the
true gradient, "aligned" is the cosine between the two, and "spread" is the standard deviation of one response's
gradient. Bias and spread are relative to the length of the true gradient.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from benchmarks.report import Row, arguments, publish
from rollflow.tasks.objectives import build_objective
from rollflow.tasks.objectives.base import MaskedTokens, Objective
from rollflow.tasks.objectives.config import PartsObjective
from rollflow.tasks.objectives.presets import PRESETS

TOKENS, LENGTH = 3, 3
STALENESS = (0.0, 0.3, 1.0)
BANDITS = 25
COPIES = 10_000  # responses in the batch, for an objective that needs a whole batch
F64 = torch.float64


@dataclass(frozen=True, slots=True)
class Found:
    """Bias, alignment and spread of one objective at one staleness (see the module's docstring)."""

    bias: float
    aligned: float
    spread: float


class Bandit:
    """A problem: all responses (R, LENGTH), their rewards (R,), and the logits of both policies."""

    def __init__(self, staleness: float, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.responses = torch.tensor(list(itertools.product(range(TOKENS), repeat=LENGTH)))
        self.rewards = torch.randint(0, 2, (len(self.responses),), generator=draw).to(F64)
        self.logits = torch.randn(LENGTH, TOKENS, TOKENS, dtype=F64, generator=draw).requires_grad_()
        off = torch.randn(LENGTH, TOKENS, TOKENS, dtype=F64, generator=draw)
        self.behaviour = self.logps(self.logits.detach() + self._scaled(off, staleness))

    def logps(self, logits: Tensor) -> Tensor:
        """Return the log-prob of each token of each response, (R, LENGTH)."""
        before = torch.nn.functional.pad(self.responses[:, :-1], (1, 0))
        table = torch.log_softmax(logits, -1)
        return table[torch.arange(LENGTH), before, self.responses]

    def _scaled(self, off: Tensor, staleness: float) -> Tensor:
        """Scale a perturbation of the logits so that the log-probs of the two policies differ by `staleness` (root mean
        square, to first order).
        """
        centred = off - (off * torch.softmax(self.logits.detach(), -1)).sum(-1, keepdim=True)
        return off * staleness / centred.square().mean().sqrt()

    def true_gradient(self) -> Tensor:
        """Return the gradient of the mean reward under the policy being trained."""
        mean = (self.logps(self.logits).sum(1).exp() * self.rewards).sum()
        return torch.autograd.grad(mean, self.logits)[0].flatten()

    def gradients(self, config: PartsObjective) -> Tensor:
        """Return the ascent direction of each response, (R, parameters)."""
        objective, logp = build_objective(config), self.logps(self.logits)
        chances_R = self.behaviour.sum(1).exp()
        baseline = 0.0 if config.kind == "reinforce" else (chances_R * self.rewards).sum()
        advantage_R = self.rewards - baseline
        part = config.advantage
        advantage_R = advantage_R * torch.where(advantage_R < 0, part.negative_weight, part.positive_weight)
        tokens = MaskedTokens(
            logp_M=logp.flatten(),
            behaviour_M=self.behaviour.flatten(),
            advantage_M=advantage_R.repeat_interleave(LENGTH),
            row_M=torch.arange(len(logp)).repeat_interleave(LENGTH),
            proximal_M=logp.detach().flatten(),
            kept_M=self._kept(objective, logp.detach()) if objective.uses_batch else None,
        )
        loss_R = objective.loss(tokens).loss_M.view(-1, LENGTH).sum(1)
        one = torch.eye(len(loss_R), dtype=F64)
        return -torch.autograd.grad(loss_R, self.logits, one, is_grads_batched=True)[0].flatten(1)

    def _kept(self, objective: Objective, logp: Tensor) -> Tensor:
        """Return which tokens the objective keeps in a batch in which each response is as frequent as under the
        behaviour policy.
        """
        copies_R = (self.behaviour.sum(1).exp() * COPIES).round().long().clamp(min=1)
        batch = (x.repeat_interleave(copies_R, 0).flatten() for x in (logp, self.behaviour))
        kept = objective.keep(*batch).view(-1, LENGTH)
        return kept[copies_R.cumsum(0) - 1].flatten()

    def found(self, config: PartsObjective) -> Found:
        """Compute bias, alignment and spread of an objective."""
        true, chances_R, each = self.true_gradient(), self.behaviour.sum(1).exp(), self.gradients(config)
        mean = chances_R @ each
        variance = chances_R @ (each - mean).square().sum(1)
        length = true.norm()
        cosine = torch.nn.functional.cosine_similarity(mean, true, dim=0)
        return Found(float((mean - true).norm() / length), float(cosine), float(variance.sqrt() / length))


def median(found: Iterable[Found]) -> Found:
    """Return the medians of bias, alignment and spread."""
    return Found(*(statistics.median(figures) for figures in zip(*map(astuple, found), strict=True)))


def rows() -> Sequence[Row]:
    """Return the rows of all presets, and of exact importance weights of whole responses, which have no bias."""
    exact = {"ratio": {"level": "sequence"}, "surrogate": {"kind": "policy-gradient", "positive": [0, 1e9]}}
    exact["surrogate"]["negative"] = [0, 1e9]  # type: ignore[index]
    configs = {name: PartsObjective.model_validate({"kind": name}) for name in PRESETS}
    configs["exact weights"] = PartsObjective.model_validate({"kind": "reinforce", **exact})
    made: list[Row] = []
    for staleness in STALENESS:
        bandits = [Bandit(staleness, seed) for seed in range(BANDITS)]
        for name, config in configs.items():
            found = median(bandit.found(config) for bandit in bandits)
            case = f"{name}, {staleness:g} nats"
            made += [
                Row(case, "bias", found.bias),
                Row(case, "aligned", found.aligned),
                Row(case, "spread", found.spread),
            ]
    return made


def main() -> None:
    """Compute and print the table."""
    chosen = arguments(__doc__.splitlines()[0] if __doc__ else "").parse_args()
    publish(rows(), "gradients on stale samples", chosen.json)


if __name__ == "__main__":
    main()
