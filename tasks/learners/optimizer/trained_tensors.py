"""The trained parameters of the policy or the critic, with the AdamW optimizer that trains them. Trained parameters and
AdamW's state are saved and loaded as named tensors, such as "exp_avg/<parameter>".

    begin --> (forward, backward, take_gradients)* --> clip --> apply --> ... --> tensors
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rollflow.storage.errors import Corrupt
from rollflow.tasks.learners.checkpoint.shards import Named
from rollflow.tasks.learners.config import TrainBase
from rollflow.tasks.learners.optimizer.master_weights import MasterWeights

MASTER = "master"  # prefix of the names under which master weights are saved
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # AdamW's state of a parameter: number of steps, and moments


class TrainedTensors:
    """The trained parameters, by name, with the AdamW optimizer that trains them."""

    def __init__(self, given: Mapping[str, nn.Parameter], config: TrainBase, learning_rate: float) -> None:
        self.max_grad_norm, self.fused = config.max_grad_norm, config.fused_adamw
        self.trained = MasterWeights(given, wide=config.master_dtype == "float32")
        self.adamw = torch.optim.AdamW(
            group_by_decay(self.trained.parameters.values(), config),
            lr=learning_rate,
            betas=config.betas,
            fused=config.fused_adamw,
        )

    def begin(self, rate: float) -> None:
        """Prepare the first update of a policy version: set the learning rate, and copy weights that other code has
        changed to the master weights.
        """
        self.trained.follow()
        for group in self.adamw.param_groups:
            group["lr"] = rate

    def clear(self) -> None:
        """Delete the gradients."""
        self.trained.clear()

    def clip(self) -> float:
        """Scale down the gradient if its norm exceeds `max_grad_norm`; return the norm before scaling."""
        return float(torch.nn.utils.clip_grad_norm_(self.trained.parameters.values(), self.max_grad_norm))

    def apply(self) -> None:
        """Take the optimizer step, and delete the gradient to free its memory."""
        self.adamw.step()
        self.trained.publish()
        self.clear()

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save for the parameters that AdamW has updated, by names such as
        "exp_avg/<parameter>"."""
        return {
            f"{key}/{name}": torch.as_tensor(value).detach()
            for name, parameter in self.trained.parameters.items()
            if (kept := self.adamw.state.get(parameter))
            for key, value in {**kept, **({MASTER: parameter} if self.trained.wide else {})}.items()
        }

    def expected_tensors(self, saved: Iterable[str]) -> dict[str, Tensor]:
        """Return placeholders of the tensors that should be saved for the parameters named in `saved`.

        Placeholders have the right names, shapes and types, but arbitrary values.
        """
        named = {name.partition("/")[2] for name in saved}
        one = torch.zeros(())
        return {
            f"{key}/{name}": one if key == "step" else parameter
            for name, parameter in self.trained.parameters.items()
            for key in (*MOMENTS, *([MASTER] if self.trained.wide else []))
            if name in named
        }

    def load(self, given: Named) -> None:
        """Replace the optimizer's state by tensors that `tensors` returned.

        The model must already have the weights that it had when `tensors` was called.
        """
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
            del value  # free the memory of the file before the next file is read
        self.trained.begin(mastered)


def group_by_decay(parameters: Iterable[nn.Parameter], config: TrainBase) -> list[dict[str, Any]]:
    """Return AdamW's parameter groups: the parameters that decay, and those that do not (see `train.decayed`)."""
    decaying, others = list[nn.Parameter](), list[nn.Parameter]()
    for parameter in parameters:
        decays = not config.weight_decay or config.decayed == "all" or parameter.ndim > 1
        (decaying if decays else others).append(parameter)
    groups = ((decaying, config.weight_decay), (others, 0.0))
    return [{"params": some, "weight_decay": decay} for some, decay in groups if some]


def check_fit(what: str, given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise `Corrupt` if the tensors `given` and `own` differ in name, shape or type."""
    found, wanted = ({(n, t.shape, t.dtype) for n, t in tensors.items()} for tensors in (given, own))
    if differing := sorted({name for name, *_ in found ^ wanted}):
        raise Corrupt(
            f"the tensors of {what} differ in name or shape from those of the model: {', '.join(differing[:4])}"
        )


def check_parts(files: Collection[str], stems: Sequence[str], saved: Collection[str]) -> None:
    """Raise `Corrupt` if a file name has none of the prefixes `stems`, or if a prefix has no file.

    Before the first update a prefix may have no file, because the critic and the reference policy then store nothing.
    """
    strange = sorted(name for name in files if not name.startswith(tuple(stems)))
    begun = any(name.startswith(MOMENTS) for name in saved)
    lacking = [stem for stem in stems if begun and not any(name.startswith(stem) for name in files)]
    if differing := [*strange, *lacking]:
        raise Corrupt(
            "the tensors of the stored learner state differ in name or shape from those of the model: "
            f"{', '.join(differing[:4])}"
        )
