"""What an update did with its tokens, by their age: metrics of a version. Shapes: M tokens of a micro-batch.

All of them are over the tokens that had a gradient, each counted once. An age is the version that is trained less the
one that sampled the token; `OLDEST` stands for what is older, too. Names end in `_age_<age>`; without it, all ages.

- `ratio_mean`, `ratio_max`, and of 1 and 99 in 100 tokens `ratio_p1`, `ratio_p99`: of pi/mu as the update saw it; fresh
  tokens of an exact engine have 1.
- `effective_samples`: (sum of pi/mu)^2 over the sum of its squares, by the number of tokens (Kish 1965): 1 where all
  weights are equal.
- `clipped_up`, `clipped_down`: share of tokens that a clip held back, by the sign of the advantage.
- `corrected`: share of tokens whose ratio a correction found out of range, and capped or left out.
- `kl_behaviour`: KL(mu || pi) in nats by its estimator r - 1 - log r, r = pi/mu (k3).
- `ratio_distance`: mean |log pi/mu|. Before the first update, on tokens of the newest version (`engine_gap`), that is
  how far the learner's log-probs are from the engine's; the probe of a weight update looks at fixed tokens only.
- `entropy`: of the policy where it chose a token, where the objective asks for it.
- `kl_reference`: KL(pi || reference) in nats a token by k3, where there is a reference; of all ages together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rollflow.tasks.learners.ranks import Ranks
from rollflow.tasks.objectives.base import MaskedTokens, TokenLoss
from rollflow.tasks.objectives.ratios import BOUND

OLDEST = 4
COLUMNS = 6  # that are kept of each token; see `add`


class Diagnostics:
    """Gathers what micro-batches tell of one version: on their device until it is asked for, since to read waits."""

    def __init__(self, version: int) -> None:
        self.updates = 0  # that the version has had
        self.version = version
        self._added: list[tuple[Tensor, Tensor | None, bool]] = []  # columns, divergences, before the first update
        self._found: list[np.ndarray] = []  # columns: see `add`
        self._gaps: list[np.ndarray] = []
        self._divergences: list[np.ndarray] = []

    def add(self, tokens: MaskedTokens, loss: TokenLoss, versions_M: Tensor) -> None:
        """Take in a micro-batch; `versions_M` sampled its tokens."""
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
        """Take in what the other ranks saw."""
        self._read()
        self._found = [part.reshape(COLUMNS, -1) for part in ranks.gathered(_flat(self._found))]
        self._gaps = ranks.gathered(_flat(self._gaps))
        self._divergences = ranks.gathered(_flat(self._divergences))

    def metrics(self, *, entropy: bool) -> Mapping[str, float]:
        """All of them; none where no token had a gradient."""
        self._read()
        if not self._found:
            return {}
        found = np.concatenate(self._found, axis=1)
        told = _of(found, "", entropy)
        for age in np.unique(found[0]):
            told |= _of(found[:, found[0] == age], f"_age_{int(age)}", entropy)
        for name, parts in (("engine_gap", self._gaps), ("kl_reference", self._divergences)):
            if sum(map(len, parts)):
                told[name] = float(np.concatenate(parts).mean())
        return told

    def _read(self) -> None:
        """Take in what was added."""
        for columns, divergence_M, is_first in self._added:
            found = columns.cpu().numpy()
            self._found.append(found)
            if divergence_M is not None:
                self._divergences.append(divergence_M.cpu().numpy())
            if is_first:
                self._gaps.append(np.abs(found[1][found[0] == 0]))
        self._added.clear()


def _flat(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Parts one beside the other, as one line."""
    return np.concatenate(parts, axis=-1).ravel() if parts else np.zeros(0)


def _of(found: np.ndarray, end: str, entropy: bool) -> dict[str, float]:
    """Of some tokens; names end in `end`."""
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
