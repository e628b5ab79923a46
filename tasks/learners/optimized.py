"""Parameters and the AdamW that changes them, saved and loaded as tensors by name: the policy's, and the critic's.

    begin --> (forward, backward, take_gradients)* --> clip --> apply --> ... --> tensors

What is saved of a parameter that AdamW has changed: its moments ("exp_avg/<parameter>"), its step, and its master where
it has one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from rollflow.storage.errors import Corrupt
from rollflow.tasks.learners.config import Ranked
from rollflow.tasks.learners.masters import Trained
from rollflow.tasks.learners.shards import Named

MASTER = "master"  # what is saved of a parameter with a master
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps of a parameter that it has changed


class Optimized:
    """See the module's docstring. Names are those that the parameters are given with."""

    def __init__(self, given: Mapping[str, nn.Parameter], config: Ranked, learning_rate: float) -> None:
        self.max_grad_norm, self.fused = config.max_grad_norm, config.fused_adamw
        self.trained = Trained(given, wide=config.master_dtype == "float32")
        self.adamw = torch.optim.AdamW(
            self.trained.parameters.values(),
            lr=learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=config.fused_adamw,
        )

    def begin(self, rate: float) -> None:
        """Before a version's first update: where somebody else changed a weight, go on from there."""
        self.trained.follow()
        for group in self.adamw.param_groups:
            group["lr"] = rate

    def clear(self) -> None:
        """Forget gradients."""
        self.trained.clear()

    def clip(self) -> float:
        """Scale a gradient that is too long; returns how long it was."""
        return float(torch.nn.utils.clip_grad_norm_(self.trained.parameters.values(), self.max_grad_norm))

    def apply(self) -> None:
        """Take the gradient's step, and forget the gradient: it would take memory beside what is published."""
        self.adamw.step()
        self.trained.publish()
        self.clear()

    def tensors(self) -> dict[str, Tensor]:
        """Of the parameters that it has changed: "exp_avg/<parameter>" and so on."""
        return {
            f"{key}/{name}": torch.as_tensor(value).detach()
            for name, parameter in self.trained.parameters.items()
            if (kept := self.adamw.state.get(parameter))
            for key, value in {**kept, **({MASTER: parameter} if self.trained.wide else {})}.items()
        }

    def like(self, saved: Iterable[str]) -> dict[str, Tensor]:
        """Tensors of the parameters that `saved` has something of: with their shapes and types, not their values."""
        named = {name.partition("/")[2] for name in saved}
        one = torch.zeros(())
        return {
            f"{key}/{name}": one if key == "step" else parameter
            for name, parameter in self.trained.parameters.items()
            for key in (*MOMENTS, *([MASTER] if self.trained.wide else []))
            if name in named
        }

    def load(self, given: Named) -> None:
        """Take over what `tensors` gave; the model has the weights that it had then."""
        self.adamw.state.clear()
        mastered = []
        for name, value in given:
            key, _, parameter = name.partition("/")
            trained = self.trained.parameters[parameter]
            if key == MASTER:
                trained.detach().copy_(value)
                mastered.append(parameter)
                continue
            device = "cpu" if key == "step" and not self.fused else trained.device
            self.adamw.state[trained][key] = value.to(device, copy=True)
            del value  # its file, before the next one is read
        self.trained.begin(mastered)


def check_fit(what: str, given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """`Corrupt` if they are not the same tensors by name, shape and type."""
    found, wanted = ({(n, t.shape, t.dtype) for n, t in tensors.items()} for tensors in (given, own))
    if differing := sorted({name for name, *_ in found ^ wanted}):
        raise Corrupt(f"{what} not fit the model: {', '.join(differing[:4])}")


def check_parts(files: Collection[str], stems: Sequence[str], saved: Collection[str]) -> None:
    """`Corrupt` if there is a file that begins with none of `stems`, or after an update a stem without a file.

    `saved` are the names of the policy's tensors. Before the first update a critic and a reference store nothing.
    """
    strange = sorted(name for name in files if not name.startswith(tuple(stems)))
    begun = any(name.startswith(MOMENTS) for name in saved)
    lacking = [stem for stem in stems if begun and not any(name.startswith(stem) for name in files)]
    if differing := [*strange, *lacking]:
        raise Corrupt(f"the learner state does not fit the model: {', '.join(differing[:4])}")
