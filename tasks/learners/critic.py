"""The critic: what reward is still to come, before each token (PPO: Schulman et al. 2017).

It begins as a copy of the policy at the first version that is trained, with a head that expects nothing; or it is that
head alone, on what the policy computes. It is trained towards the returns that `objectives/gae.py` gives, on every row,
after the policy's own update on the same rows. Its weights and moments are part of the learner's state.

Shapes: M masked tokens of a micro-batch, B of a batch, H hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rollflow.tasks.learners.config import Ranked
from rollflow.tasks.learners.optimized import Optimized, check_fit
from rollflow.tasks.learners.shards import Named
from rollflow.tasks.objectives.packing import MicroBatch
from rollflow.tasks.policies.device import send

WEIGHT = "weight/"  # what names of its weights begin with in its state


class Values(nn.Module):
    """One number a hidden state; `decoder` makes these, unless it is the policy's."""

    def __init__(self, decoder: nn.Module | None, hidden: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.head = nn.Linear(hidden, 1)  # float32, whatever the decoder is


class Critic:
    """See the module's docstring."""

    def __init__(self, policy: Any, config: Ranked) -> None:
        self._policy, self._config, self._dtype = policy, config.critic, policy.dtype
        own = copy.deepcopy(policy.get_decoder()) if config.critic.model == "own" else None
        embeddings = policy.get_output_embeddings().weight
        self.model = Values(own, embeddings.shape[-1]).to(embeddings.device)
        self.optimized = Optimized(dict(self.model.named_parameters()), config, config.critic.learning_rate)
        self.begun = False

    def begin(self) -> None:
        """Before a run's first update: what the policy is now, and values of zero."""
        if not self.begun:
            if self.model.decoder is not None:
                self.model.decoder.load_state_dict(self._policy.get_decoder().state_dict())
            for parameter in self.model.head.parameters():
                nn.init.zeros_(parameter)
            self.optimized.load(())
            self.begun = True

    def values(self, micro: MicroBatch) -> Tensor:
        """(M,) float32, what is expected before each of the tokens."""
        device = self.model.head.weight.device
        row, position = (send(index, device) for index in micro.where)
        hidden_MH = self._hidden(micro.inputs(device, self._dtype))[row, position]
        found: Tensor = self.model.head(hidden_MH.float()).squeeze(-1)
        return found

    def update(self, micros: Iterable[MicroBatch], values_B: Tensor, returns_B: Tensor, tokens: int) -> float:
        """Add up the gradient of the mean loss over `tokens`; returns that loss. `values_B` are those of before."""
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
        """All of its state; nothing before it has begun."""
        return {**self._weights(), **self.optimized.tensors()} if self.begun else {}

    def check(self, saved: Mapping[str, Tensor]) -> None:
        """`Corrupt` if it is not what `tensors` gave."""
        if saved:
            check_fit("the critic's state does", saved, {**self._weights(), **self.optimized.like(others(saved))})

    @torch.no_grad()
    def load(self, saved: Named) -> None:
        """Take over what `tensors` gave."""
        self.begun = False
        self.optimized.load(self._without_weights(saved))

    def _without_weights(self, saved: Named) -> Iterator[tuple[str, Tensor]]:
        """Its weights are taken on the way."""
        for name, tensor in saved:
            self.begun = True
            if name.startswith(WEIGHT):
                self._take(name.removeprefix(WEIGHT), tensor)
            else:
                yield name, tensor
            del tensor  # its file, before the next one is read

    def _take(self, name: str, weight: Tensor) -> None:
        self.model.get_parameter(name).copy_(weight)

    def _weights(self) -> dict[str, Tensor]:
        return {f"{WEIGHT}{name}": parameter.detach() for name, parameter in self.model.named_parameters()}

    def _hidden(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """(L, T, H); where the policy computes it, without a gradient."""
        own = self.model.decoder
        decoder = self._policy.get_decoder() if own is None else own
        with torch.set_grad_enabled(own is not None and torch.is_grad_enabled()):
            found: Tensor = decoder(**inputs, use_cache=False).last_hidden_state
        return found


def value_loss(value_M: Tensor, old_M: Tensor, return_M: Tensor, clip: float) -> Tensor:
    """(M,) half the larger square of two errors: of the value, and of the value held within `clip` of the old one.

    The clip of PPO's first code (Schulman et al. 2017); verl and TRL have the same.
    """
    held_M = old_M + (value_M - old_M).clamp(-clip, clip)
    return torch.maximum((value_M - return_M).square(), (held_M - return_M).square()) / 2


def explained_variance(values_B: Tensor, returns_B: Tensor) -> float:
    """1 - Var(return - value) / Var(return): 1 is a critic that knows, 0 one that says the mean; 0 where none vary."""
    spread = float(returns_B.double().var(correction=0)) if len(returns_B) else 0.0
    if spread == 0.0:
        return 0.0
    return 1 - float((returns_B.double() - values_B.double()).var(correction=0)) / spread


def others(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is no weight."""
    return {name: value for name, value in saved.items() if not name.startswith(WEIGHT)}
