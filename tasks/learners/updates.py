"""Computes the updates that turn one policy version into the next. An update is an optimizer step of the policy on a
minibatch, and a step of the critic if there is one.

In shapes, R is the number of rows, B and M are the numbers of tokens with loss mask 1 in the batch and in a part of a
micro-batch, N is the number of tokens with a loss in a micro-batch, and H the hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import cast

import torch
from torch import Tensor

from rollflow.tasks.learners.base import WaitForPublish
from rollflow.tasks.learners.diagnostics import Diagnostics
from rollflow.tasks.learners.forward.models import TrainedModels
from rollflow.tasks.learners.forward.observations import ObservationLoss
from rollflow.tasks.learners.forward.pre_update import PreUpdate
from rollflow.tasks.learners.malloc_trim import give_back_all
from rollflow.tasks.learners.optimizer.nonfinite import check_figures
from rollflow.tasks.objectives.aggregation import row_weights
from rollflow.tasks.objectives.base import MaskedTokens
from rollflow.tasks.objectives.packing import MicroBatch
from rollflow.tasks.objectives.rows import BatchRows
from rollflow.tasks.policies.device import send

LossOf = Callable[[Tensor], Tensor]  # returns the loss of tokens, given the hidden states that predict these tokens


class Updates:
    """The updates that train one policy version. `seen` collects diagnostics over all updates."""

    def __init__(
        self, roles: TrainedModels, data: BatchRows, before: PreUpdate, version: int, settle: WaitForPublish
    ) -> None:
        self.device, self.model, self.token_logprobs = roles.device, roles.model, roles.token_logprobs
        self.roles, self.data, self.before, self.seen = roles, data, before, Diagnostics(version)
        self.settle = settle

    def take_step(self, part: list[int]) -> dict[str, float]:
        """Take one optimizer step of the policy, and of the critic if there is one, on the rows of a minibatch."""
        return self._update(part) | self._update_critic(part)

    def _update(self, part: list[int]) -> dict[str, float]:
        roles, seen = self.roles, self.seen
        weight_R, observation = self.weights_of(part), self.observe(part)
        roles.policy.clear()
        # The sum of losses stays a tensor, because reading its value would wait for the GPU.
        added = torch.zeros((), dtype=torch.float64, device=self.device)
        for micro in self.drop_idle(roles.micros(self.data, self.select_rows(part))):
            with self.token_logprobs.add_in_place():
                added += self._backward(micro, self._list_losses(micro, weight_R, observation))
            roles.policy.trained.take_gradients()
        total = roles.ranks.add_gradients(roles.policy.trained.parameters.values(), float(added))
        found = {"loss": total, "grad_norm": roles.policy.clip()}
        if observation is not None:
            found |= observation.sum_ranks(roles.ranks)
        check_figures(found, seen.version)
        self.settle()
        roles.policy.apply()
        seen.updates += 1
        return found

    def observe(self, part: list[int]) -> ObservationLoss | None:
        """Return the loss of the environment's tokens in a minibatch, or None if they are not trained on."""
        if self.data.observed is None:
            return None
        return ObservationLoss(self.roles.config.objective, self.token_logprobs, self.data, part, self.device)

    def select_rows(self, part: list[int]) -> list[int]:
        """Return the rows of a minibatch that have a loss."""
        observed, counts_R = self.data.observed, self.before.signal_R
        return self.roles.select_rows(part, counts_R if observed is None else counts_R | (observed.counts > 0))

    def drop_idle(self, micros: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the micro-batches, without the sampled tokens of rows in which only the environment's tokens are
        trained on."""
        idle = self.data.observed is not None and not self.roles.objective.every_row
        for micro in micros:
            yield micro.keep_rows(torch.from_numpy(self.before.signal_R)) if idle else micro

    def weights_of(self, part: list[int]) -> Tensor:
        """Return the weight of each row's tokens in the minibatch's loss; zero for rows of other minibatches."""
        weight_R = torch.zeros(len(self.data.rewards))
        tokens_R = torch.from_numpy(self.data.masked_tokens[part])
        episodes_R = None if self.data.episodes is None else torch.from_numpy(self.data.episodes[part])
        aggregation, longest = self.roles.config.objective.aggregation, self.roles.longest
        weight_R[part] = row_weights(tokens_R, aggregation, longest, episodes_R).float()
        return weight_R

    def compute_loss(self, some: slice, hidden_MH: Tensor, micro: MicroBatch, weight_R: Tensor) -> Tensor:
        """Return the loss of the given tokens of a micro-batch, and add their diagnostics to `seen`."""
        tokens = self._masked_tokens(micro, some, hidden_MH)
        result = self.roles.objective.loss(tokens)
        versions_M = torch.from_numpy(self.data.versions)[micro.among[some]]
        self.seen.add(tokens, result, send(versions_M, self.device))
        return (result.loss_M * send(weight_R[micro.row_M[some]], self.device)).sum()

    def _list_losses(
        self, micro: MicroBatch, weight_R: Tensor, observation: ObservationLoss | None
    ) -> list[tuple[slice, LossOf]]:
        """Return the parts of a micro-batch's loss, each with the slice of its hidden states.

        With a large vocabulary, each part of the loss has only some of the tokens, because the logits of all tokens
        would need too much memory. Tokens of the environment are separate parts, after the M tokens with loss mask 1.
        """
        observed, found = micro.observed, list[tuple[slice, LossOf]]()
        if len(micro.targets) or observed is None or not len(observed.targets):
            parts = self.token_logprobs.parts(micro.row_M, by_token=self.roles.objective.by_token)
            found += [(some, partial(self.compute_loss, some, micro=micro, weight_R=weight_R)) for some in parts]
        if observation is not None and observed is not None and len(observed.targets):
            behind = len(micro.targets)
            for some in self.token_logprobs.parts(observed.row_O, by_token=True):
                loss_of = partial(observation.compute, some, observed=observed)
                found.append((slice(behind + some.start, behind + some.stop), loss_of))
        return found

    def _backward(self, micro: MicroBatch, losses: list[tuple[slice, LossOf]]) -> Tensor:
        """Add the gradient of a micro-batch's loss to the policy's gradients, and return the loss in float64.

        The output head and the loss run forward and backward for one part at a time, so that memory holds the logits of
        one part. After all parts, the decoder runs backward once for all tokens.
        """
        inputs, (row, place) = micro.inputs(self.device, self.model.dtype), micro.predicting
        hidden_NH = self.token_logprobs.hidden(inputs, (send(row, self.device), send(place, self.device)))
        if len(losses) == 1:
            loss = losses[0][1](hidden_NH)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach().double()
        if self.device.type == "cpu":
            give_back_all()  # free the memory of the previous micro-batch before logits are computed
        given, total = hidden_NH.detach(), torch.zeros((), dtype=torch.float64, device=self.device)
        leaves = [given[some].requires_grad_() for some, _ in losses]
        for (_, loss_of), leaf in zip(losses, leaves, strict=True):
            loss = loss_of(leaf)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach().double()
        hidden_NH.backward(torch.cat([cast(Tensor, leaf.grad) for leaf in leaves]))  # type: ignore[no-untyped-call]
        return total

    def _update_critic(self, part: list[int]) -> dict[str, float]:
        critic, data, before = self.roles.critic, self.data, self.before
        if critic is None:
            return {}
        assert before.values_B is not None
        assert before.judged.returns_B is not None
        tokens = int(data.masked_tokens[part].sum())
        loss = critic.update(self.roles.micros(data, part), before.values_B, before.judged.returns_B, tokens)
        loss = self.roles.ranks.add_gradients(critic.optimized.trained.parameters.values(), loss)
        found = {"value_loss": loss, "critic_grad_norm": critic.optimized.clip()}
        check_figures(found, self.seen.version, "train.critic.learning_rate")
        critic.optimized.apply()
        return found

    def _masked_tokens(self, micro: MicroBatch, some: slice, hidden_MH: Tensor) -> MaskedTokens:
        """Return the inputs of the objective for the given tokens, which `hidden_MH` predicts."""
        roles, before, among = self.roles, self.before, micro.among[some]
        distinct = micro.find_distinct(some)
        hidden, targets = hidden_MH, send(micro.targets[some], self.device)
        if distinct is not None:  # tokens that several rows share need only one log-prob
            first, index_M = (send(one, self.device) for one in distinct)
            hidden, targets = hidden_MH[first], targets[first]
        logp_M, entropy_M = self.token_logprobs.of(
            hidden, targets, temperature=roles.temperature, entropy=roles.objective.uses_entropy
        )
        if distinct is not None:
            logp_M, entropy_M = logp_M[index_M], None if entropy_M is None else entropy_M[index_M]

        def known(found_B: Tensor | None) -> Tensor | None:
            return None if found_B is None else send(found_B[among], self.device)

        proximal_M = known(before.proximal_B) if roles.objective.uses_proximal else None
        if roles.objective.uses_proximal and proximal_M is None:
            proximal_M = logp_M.detach()
        return MaskedTokens(
            logp_M=logp_M,
            behaviour_M=send(before.behaviour_B[among], self.device),
            advantage_M=send(before.judged.advantage_B[among], self.device),
            row_M=send(micro.row_M[some], self.device),
            proximal_M=proximal_M,
            entropy_M=entropy_M,
            kept_M=known(before.kept_B),
            reference_M=known(before.reference_B),
            kl_weight=None if roles.penalties.kl_target is None else roles.kl_weight,
        )
