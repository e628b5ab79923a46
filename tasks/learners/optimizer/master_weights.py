"""Master weights: float32 copies of policy weights that have a shorter data type. The optimizer updates the master
weights (Micikevicius et al. 2018, Mixed precision training).

At a learning rate of 1e-6, rounding to bfloat16 would lose 99 of 100 updates of a weight, because they are smaller than
half a rounding step. The policy's weights are the master weights, rounded to bfloat16.

    policy (bfloat16) --> forward, backward --> gradients, added up in float32 --> optimizer --> masters --> policy

- If other code, such as a cold start (supervised training), changes a weight of the policy, `follow` copies the new
  value to the master weight.
- Without master weights, the optimizer updates the policy's own parameters, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn


class MasterWeights:
    """The parameters that the optimizer updates: float32 master weights, or the policy's own parameters."""

    def __init__(self, given: Mapping[str, nn.Parameter], *, wide: bool) -> None:
        """Set up the parameters; with `wide`, the optimizer updates float32 master weights, unless all parameters are
        float32."""
        self._policy = dict(given)
        self.wide = wide and any(parameter.dtype != torch.float32 for parameter in self._policy.values())
        self.parameters = {
            name: nn.Parameter(parameter.detach().float()) if self.wide else parameter
            for name, parameter in self._policy.items()
        }

    @torch.no_grad()
    def begin(self, but: Collection[str] = ()) -> None:
        """Set the master weights to the policy's weights, except for the names in `but`."""
        for name in self._policy.keys() - set(but) if self.wide else ():
            self.parameters[name].copy_(self._policy[name])

    @torch.no_grad()
    def follow(self) -> None:
        """Replace each master weight that does not round to the policy's weight by the policy's weight."""
        for parameter, master in self._pairs():
            torch.where(master.to(parameter.dtype) == parameter, master, parameter, out=master)

    def clear(self) -> None:
        """Delete all gradients, including gradients that a cold start (supervised training) left on the policy."""
        for parameter in (*self._policy.values(), *self.parameters.values()):
            parameter.grad = None

    def take_gradients(self) -> None:
        """Add the policy's gradients to the master weights' gradients, and free the policy's gradients."""
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
        """Round the master weights to the policy's data type, and set the policy's weights to the result."""
        if pairs := self._pairs():
            torch._foreach_copy_([parameter for parameter, _ in pairs], [master for _, master in pairs])

    def _pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Return pairs of a policy parameter and its master weight; return an empty list if there are no master
        weights.
        """
        return [(own, self.parameters[name]) for name, own in self._policy.items()] if self.wide else []
