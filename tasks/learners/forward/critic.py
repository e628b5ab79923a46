"""The critic estimates, before each token, the reward that the rest of the response will get (PPO: Schulman et al.
2017).

At first, the critic is a copy of the policy with a new head that outputs zero. With `train.critic.model = "head"`, the
critic is only a head on the policy's hidden states. After each update of the policy, the critic is trained on every row
of the minibatch, to predict the returns that `objectives/gae.py` computes. Weights and AdamW moments of the critic are
part of the learner's state.

In shapes, M is the number of tokens with loss mask 1 in a micro-batch, B the number of such tokens in a batch, and H
the hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rollflow.tasks.learners.checkpoint.shards import Named
from rollflow.tasks.learners.config import TrainBase
from rollflow.tasks.learners.optimizer.trained_tensors import TrainedTensors, check_fit
from rollflow.tasks.objectives.packing import MicroBatch
from rollflow.tasks.policies.device import send

WEIGHT = "weight/"  # prefix of the names of the critic's weights in the critic's state


class ValueHead(nn.Module):
    """Maps each hidden state to one number, the critic's value. `decoder` is None if the policy computes the hidden
    states."""

    def __init__(self, decoder: nn.Module | None, hidden: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.head = nn.Linear(hidden, 1)  # float32, whatever the data type of the decoder


class Critic:
    """A model that estimates, before each token, the reward that the rest of the response will get."""

    def __init__(self, policy: Any, config: TrainBase) -> None:
        self._policy, self._config, self._dtype = policy, config.critic, policy.dtype
        own = copy.deepcopy(policy.get_decoder()) if config.critic.model == "own" else None
        embeddings = policy.get_output_embeddings().weight
        self.model = ValueHead(own, embeddings.shape[-1]).to(embeddings.device)
        self.optimized = TrainedTensors(dict(self.model.named_parameters()), config, config.critic.learning_rate)
        self.begun = False

    def begin(self) -> None:
        """Set up the critic before a run's first update: copy the policy's decoder, and set the head to zero."""
        if not self.begun:
            if self.model.decoder is not None:
                self.model.decoder.load_state_dict(self._policy.get_decoder().state_dict())
            for parameter in self.model.head.parameters():
                nn.init.zeros_(parameter)
            self.optimized.load(())
            self.begun = True

    def values(self, micro: MicroBatch) -> Tensor:
        """Return for each token with loss mask 1 the reward that the critic expects for the rest of the response
        (float32).
        """
        device = self.model.head.weight.device
        row, position = (send(index, device) for index in micro.where)
        hidden_MH = self._hidden(micro.inputs(device, self._dtype))[row, position]
        found: Tensor = self.model.head(hidden_MH.float()).squeeze(-1)
        return found

    def update(self, micros: Iterable[MicroBatch], values_B: Tensor, returns_B: Tensor, tokens: int) -> float:
        """Compute the gradient of the critic on micro-batches; return the loss: the sum over all tokens, divided by
        `tokens`.

        `values_B` are the values that the critic estimated before the policy version's first update.
        """
        self.optimized.clear()
        total = 0.0
        for micro in micros:
            found_M = self.values(micro)
            old_M, return_M = (known_B[micro.among].to(found_M) for known_B in (values_B, returns_B))
            loss = value_loss(found_M, old_M, return_M, self._config.value_clip).sum() / max(tokens, 1)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimized.trained.take_gradients()
            total += float(loss.detach())
        return total

    def tensors(self) -> dict[str, Tensor]:
        """Return the state of the critic as tensors by name; return an empty mapping before the first train step."""
        return {**self._weights(), **self.optimized.tensors()} if self.begun else {}

    def check(self, saved: Mapping[str, Tensor]) -> None:
        """Raise `Corrupt` if `saved` is not empty and its tensors differ from the critic's in name, shape or type."""
        if saved:
            check_fit(
                "the critic's state",
                saved,
                {**self._weights(), **self.optimized.expected_tensors(drop_weights(saved))},
            )

    @torch.no_grad()
    def load(self, saved: Named) -> None:
        """Replace the state of the critic by tensors that `tensors` returned."""
        self.begun = False
        self.optimized.load(self._take_weights(saved))

    def _take_weights(self, saved: Named) -> Iterator[tuple[str, Tensor]]:
        """Load the weights of the critic from `saved`; yield all other tensors of `saved`."""
        for name, tensor in saved:
            self.begun = True
            if name.startswith(WEIGHT):
                self._take(name.removeprefix(WEIGHT), tensor)
            else:
                yield name, tensor
            del tensor  # free the memory of the file before the next file is read

    def _take(self, name: str, weight: Tensor) -> None:
        self.model.get_parameter(name).copy_(weight)

    def _weights(self) -> dict[str, Tensor]:
        return {f"{WEIGHT}{name}": parameter.detach() for name, parameter in self.model.named_parameters()}

    def _hidden(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the hidden states of the decoder, of shape (L, T, H). Hidden states that the policy computes have no
        gradient."""
        own = self.model.decoder
        decoder = self._policy.get_decoder() if own is None else own
        with torch.set_grad_enabled(own is not None and torch.is_grad_enabled()):
            found: Tensor = decoder(**inputs, use_cache=False).last_hidden_state
        return found


def value_loss(value_M: Tensor, old_M: Tensor, return_M: Tensor, clip: float) -> Tensor:
    """Return the loss of each token: half of the squared error of the value or of the clipped value, whichever is
    larger.

    A clipped value differs by at most `clip` from the value that the critic estimated before the update. The original
    code of PPO (Schulman et al. 2017), verl and TRL clip values in the same way.
    """
    held_M = old_M + (value_M - old_M).clamp(-clip, clip)
    return torch.maximum((value_M - return_M).square(), (held_M - return_M).square()) / 2


def explained_variance(values_B: Tensor, returns_B: Tensor) -> float:
    """Return the explained variance of a critic, 1 - Var(return - value) / Var(return).

    The explained variance is 1 for a perfect critic, and 0 for a constant critic or for constant returns.
    """
    spread = float(returns_B.double().var(correction=0)) if len(returns_B) else 0.0
    if spread == 0.0:
        return 0.0
    return 1 - float((returns_B.double() - values_B.double()).var(correction=0)) / spread


def drop_weights(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the saved tensors of the critic's optimizer, without the critic's weights."""
    return {name: value for name, value in saved.items() if not name.startswith(WEIGHT)}
