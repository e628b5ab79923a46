"""An engine: what has parameters, gradients and moments in parts on all ranks, and gives them whole.

    put, load --> begin --> clear --> (run, backward)* --> clip --> apply --> ... --> whole, tensors

- All ranks call everything here, in the same order.
- What it gives has the names, shapes and types that `Optimized` has of the same parameters on one rank.
- It begins with the values that the parameters have, and no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from rollflow.tasks.learners.config import Ranked
from rollflow.tasks.learners.gloo_ranks import GlooRanks
from rollflow.tasks.learners.optimized import MASTER, MOMENTS, Optimized


class Whole(nn.Module):
    """What an engine runs: whatever it is given, so that decoder, head and loss are one forward pass to it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, of: Callable[[], Tensor]) -> Tensor:
        """What `of` gives."""
        return of()


class Engine(Optimized):
    """See the module's docstring."""

    def __init__(  # what it does otherwise than `Optimized`, it does from the beginning
        self, model: nn.Module, config: Ranked, ranks: GlooRanks
    ) -> None:
        self.ranks = ranks
        given = dict(model.named_parameters())
        for parameter in given.values():
            parameter.grad = None  # a cold start has left it
        self.types = {name: parameter.dtype for name, parameter in given.items()}
        self.shapes = {name: parameter.shape for name, parameter in given.items()}
        self.wide = config.master_dtype == "float32" and any(kind != torch.float32 for kind in self.types.values())

    def run(self, of: Callable[[], Tensor]) -> Tensor:
        """What `of` gives, with the weights where it needs them."""
        raise NotImplementedError

    def added(self, passes: Iterable[Callable[[], Tensor]]) -> list[float]:
        """Add up the gradients of the losses that `passes` give, over all ranks; returns the losses."""
        raise NotImplementedError

    def whole(self, *, everywhere: bool = False) -> dict[str, Tensor]:
        """The parameters, on the first rank; on the others empty, unless `everywhere`."""
        raise NotImplementedError

    def put(self, weights: Mapping[str, Tensor]) -> None:
        """The parameters become these; `load` follows with the rest."""
        raise NotImplementedError

    def like(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Optimized`."""
        named, one = {name.partition("/")[2] for name in saved}, torch.zeros(())
        kinds = {name: torch.float32 if self.wide else kind for name, kind in self.types.items() if name in named}
        full = {name: torch.empty(self.shapes[name], dtype=kind, device="meta") for name, kind in kinds.items()}
        keys = (*MOMENTS, *([MASTER] if self.wide else []))
        return {f"{key}/{name}": one if key == "step" else full[name] for name in full for key in keys}

    def alike(self) -> dict[str, Tensor]:
        """Tensors with the names, shapes and types of `whole`, and no values."""
        return {n: torch.empty(shape, dtype=self.types[n], device="meta") for n, shape in self.shapes.items()}
