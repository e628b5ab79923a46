"""Weights as the optimizer changes them: float32 ones behind a policy in a shorter type, or the policy's own.

A bfloat16 has 8 bits: at a learning rate of 1e-6, 99 of 100 changes are less than half a step of it, and are lost. So
the optimizer adds them up in float32 (Micikevicius et al. 2018, Mixed precision training), and the policy's weights are
these, rounded:

    policy (bfloat16) --> forward, backward --> gradients, added up in float32 --> optimizer --> masters --> policy

- After `publish`, each weight of the policy is its master, rounded.
- Where a weight was changed by somebody else (a cold start, say), `follow` gives its master the weight's value.
- Without masters the parameters are the policy's own, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn


class Trained:
    """What the optimizer changes of a policy: `parameters`, by the names of those that it is given."""

    def __init__(self, given: Mapping[str, nn.Parameter], *, wide: bool) -> None:
        """`wide`: float32 masters, where a parameter is in another type."""
        self._policy = dict(given)
        self.wide = wide and any(parameter.dtype != torch.float32 for parameter in self._policy.values())
        self.parameters = {
            name: nn.Parameter(parameter.detach().float()) if self.wide else parameter
            for name, parameter in self._policy.items()
        }

    @torch.no_grad()
    def begin(self, but: Collection[str] = ()) -> None:
        """The masters become the policy's weights, and nothing is left of what they were; those in `but` stay."""
        for name in self._policy.keys() - set(but) if self.wide else ():
            self.parameters[name].copy_(self._policy[name])

    @torch.no_grad()
    def follow(self) -> None:
        """Where a master does not round to the policy's weight, it takes the weight's value."""
        for parameter, master in self._pairs():
            torch.where(master.to(parameter.dtype) == parameter, master, parameter, out=master)

    def clear(self) -> None:
        """Forget gradients, those that a cold start has left on the policy, too."""
        for parameter in (*self._policy.values(), *self.parameters.values()):
            parameter.grad = None

    def take_gradients(self) -> None:
        """Add the policy's gradients to those of the masters, and free them."""
        sums, added = list[Tensor](), list[Tensor]()
        for parameter, master in self._pairs():
            if parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                sums.append(master.grad)
                added.append(parameter.grad)
            parameter.grad = None
        if sums:
            torch._foreach_add_(sums, added)

    @torch.no_grad()
    def publish(self) -> None:
        """The policy's weights become the masters, rounded to the nearest."""
        if pairs := self._pairs():
            torch._foreach_copy_([parameter for parameter, _ in pairs], [master for _, master in pairs])

    def _pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Each parameter of the policy and its master; none where it is its own."""
        return [(own, self.parameters[name]) for name, own in self._policy.items()] if self.wide else []
