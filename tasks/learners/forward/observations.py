"""The observation loss: the policy also learns to predict the tokens that the environment adds, such as tool output.

The loss of a minibatch is the loss of the policy's tokens + weight x L, where L is the mean of -log pi over the
environment's tokens. With the aggregation `sequence-mean`, the mean of each trajectory is computed first, and L is the
mean of these means, as in ECHO (Shrivastava et al. 2026, Terminal agents learn world models for free), which uses the
weight 0.05.

A token belongs to the environment if it follows the first sampled token of its trajectory and was not sampled by the
policy. Trajectories with advantage zero also contribute to the observation loss.

In shapes, R is the number of rows, and O the number of environment tokens in a part of a micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollflow.tasks.learners.distributed.ranks import Ranks
from rollflow.tasks.learners.forward.token_logprobs import TokenLogprobs
from rollflow.tasks.objectives.aggregation import row_weights
from rollflow.tasks.objectives.config import ObjectiveConfig
from rollflow.tasks.objectives.packing import ObservedTargets
from rollflow.tasks.objectives.rows import BatchRows
from rollflow.tasks.policies.device import send


class ObservationLoss:
    """The observation loss of one minibatch. `total` is the sum of the losses that this rank has computed so far, not
    yet multiplied by the weight of the observation loss.
    """

    def __init__(
        self,
        objective: ObjectiveConfig,
        token_logprobs: TokenLogprobs,
        data: BatchRows,
        part: list[int],
        device: torch.device,
    ) -> None:
        """Compute the weight of each token in the observation loss; `part` has the rows of the minibatch."""
        assert data.observed is not None
        counts_R = torch.from_numpy(data.observed.counts[part])
        mean = "sequence-mean" if objective.aggregation == "sequence-mean" else "token-mean"
        self._weight_R = torch.zeros(len(data.rewards))
        self._weight_R[part] = row_weights(counts_R, mean, 1).float()
        self._weight, self._token_logprobs = objective.observation_weight, token_logprobs
        self.total = torch.zeros((), dtype=torch.float64, device=device)

    def compute(self, some: slice, hidden_OH: Tensor, observed: ObservedTargets) -> Tensor:
        """Return the weighted loss of the given tokens of a micro-batch; add the loss without the weight to `total`."""
        targets_O = send(observed.targets[some], hidden_OH.device)
        logp_O, _ = self._token_logprobs.of(hidden_OH, targets_O)
        loss = -(logp_O * send(self._weight_R[observed.row_O[some]], hidden_OH.device)).sum()
        self.total += loss.detach().double()
        return self._weight * loss

    def sum_ranks(self, ranks: Ranks) -> dict[str, float]:
        """Return the observation loss L of the whole minibatch, in nats per token, as a metric."""
        found = self.total.cpu().reshape(1)
        ranks.add(found)
        return {"observation_loss": float(found)}
