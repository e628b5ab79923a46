"""Computes diagnostics of the updates of one policy version, for all tokens and for tokens of each age (staleness).

In shapes, M is the number of tokens of a micro-batch. All metrics are computed over the tokens that contribute to the
gradient. The age of a token is the policy version being trained, minus the policy version that sampled the token. If a
metric covers only one age, its name ends in `_age_<age>`; the age `OLDEST` includes all higher ages. The importance
ratio of a token is pi/mu: its probability under the trained policy, divided by its probability when it was sampled.

- `ratio_mean`, `ratio_max`, `ratio_p1` and `ratio_p99` are the mean, maximum and two percentiles of the ratio. The
  ratio is 1 for tokens that an exact inference engine sampled from the newest policy version.
- `effective_samples` is the effective sample size divided by the number of tokens (Kish 1965); 1 if all ratios are
  equal.
- `clipped_up` is the share of tokens that are clipped and have a positive advantage; `clipped_down` is the share of all
  other clipped tokens.
- `corrected` is the share of tokens whose ratio the off-policy correction capped, or that it removed from the loss.
- `kl_behaviour` is KL(mu || pi) in nats, by the estimator k3 (r - 1 - log r, where r is the ratio).
- `ratio_distance` is the mean of |log pi/mu| in nats.
- `engine_gap` is the mean of |log pi/mu| before the first update, on tokens of the newest policy version: the
  difference between the log-probs of learner and engine.
- `entropy` is the mean entropy of the policy at each token, if the objective needs the entropy.
- `kl_reference` is KL(pi || reference) in nats per token, by the estimator k3, if there is a reference policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rollflow.tasks.learners.distributed.ranks import Ranks
from rollflow.tasks.objectives.base import MaskedTokens, TokenLoss
from rollflow.tasks.objectives.ratios import BOUND

OLDEST = 4
COLUMNS = 6  # number of values that `Diagnostics.add` stores for each token


class Diagnostics:
    """Collects values of the tokens that a policy version is trained on.

    The values stay on the device until the policy version is trained, because reading a value would wait for the
    device.
    """

    def __init__(self, version: int) -> None:
        self.updates = 0  # number of updates so far
        self.version = version
        # for each micro-batch: values of its tokens, KL divergences, and whether it was added before the first update
        self._added: list[tuple[Tensor, Tensor | None, bool]] = []
        self._found: list[np.ndarray] = []  # token values of each micro-batch, in the order of the calls of `add`
        self._gaps: list[np.ndarray] = []
        self._divergences: list[np.ndarray] = []

    def add(self, tokens: MaskedTokens, loss: TokenLoss, versions_M: Tensor) -> None:
        """Add the tokens of a micro-batch; `versions_M` gives the policy version that sampled each token."""
        change_M = (tokens.logp_M.detach() - tokens.behaviour_M).double().clamp(-BOUND, BOUND)
        entropy_M = torch.zeros_like(change_M) if tokens.entropy_M is None else tokens.entropy_M.detach()
        age_M = (self.version - versions_M).clamp(0, OLDEST)
        up_M = tokens.advantage_M > 0
        corrected_M = torch.zeros_like(up_M) if loss.corrected_M is None else loss.corrected_M
        columns = age_M, change_M, loss.clipped_M & up_M, loss.clipped_M & ~up_M, corrected_M, entropy_M
        divergence_M = None
        if tokens.reference_M is not None:
            off_M = (tokens.reference_M - tokens.logp_M.detach()).double().clamp(-BOUND, BOUND)
            divergence_M = off_M.exp() - 1 - off_M
        self._added.append((torch.stack([column.double() for column in columns]), divergence_M, not self.updates))

    def gather(self, ranks: Ranks) -> None:
        """Add the token values that the other ranks collected."""
        self._read()
        self._found = [part.reshape(COLUMNS, -1) for part in ranks.gather_all(_flatten(self._found))]
        self._gaps = ranks.gather_all(_flatten(self._gaps))
        self._divergences = ranks.gather_all(_flatten(self._divergences))

    def metrics(self, *, entropy: bool) -> Mapping[str, float]:
        """Return all diagnostics by name; return an empty mapping if no token contributed to the gradient."""
        self._read()
        if not self._found:
            return {}
        found = np.concatenate(self._found, axis=1)
        told = _compute_metrics(found, "", entropy)
        for age in np.unique(found[0]):
            told |= _compute_metrics(found[:, found[0] == age], f"_age_{int(age)}", entropy)
        for name, parts in (("engine_gap", self._gaps), ("kl_reference", self._divergences)):
            if sum(map(len, parts)):
                told[name] = float(np.concatenate(parts).mean())
        return told

    def _read(self) -> None:
        """Copy the values added so far from the device to the CPU."""
        for columns, divergence_M, is_first in self._added:
            found = columns.cpu().numpy()
            self._found.append(found)
            if divergence_M is not None:
                self._divergences.append(divergence_M.cpu().numpy())
            if is_first:
                self._gaps.append(np.abs(found[1][found[0] == 0]))
        self._added.clear()


def _flatten(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Join arrays along their last axis, and flatten the result."""
    return np.concatenate(parts, axis=-1).ravel() if parts else np.zeros(0)


def _compute_metrics(found: np.ndarray, end: str, entropy: bool) -> dict[str, float]:
    """Return the metrics of the given tokens. Names of metrics end in the suffix `end`."""
    _, change, up, down, corrected, entropies = found
    ratio = np.exp(change)
    told = {
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "ratio_p1": np.quantile(ratio, 0.01),
        "ratio_p99": np.quantile(ratio, 0.99),
        "effective_samples": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
        "clipped_up": up.mean(),
        "clipped_down": down.mean(),
        "corrected": corrected.mean(),
        "kl_behaviour": (ratio - 1 - change).mean(),
        "ratio_distance": np.abs(change).mean(),
    }
    if entropy:
        told["entropy"] = entropies.mean()
    return {f"{name}{end}": float(value) for name, value in told.items()}
