"""An engine: what has parameters, gradients and moments in parts on all ranks, and gives them whole.

    put, load --> begin --> clear --> (run, backward)* --> clip --> apply --> ... --> weight, tensor

- All ranks call everything here, in the same order.
- What it gives has the names, shapes and types that `Optimized` has of the same parameters on one rank. It is gathered
  a tensor at a time: the other ranks send their parts of it to the one that stores it, and hold no more than these.
- It begins with the values that the parameters have, and no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from rollflow.tasks.learners.config import Ranked
from rollflow.tasks.learners.finite import all_finite
from rollflow.tasks.learners.freed import given_back
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

    def put(self, name: str, weight: Tensor) -> None:
        """A parameter becomes this; `load` follows with the rest, or has it on its way."""
        raise NotImplementedError

    def changed(self) -> Sequence[str]:
        """The parameters that AdamW has changed; on each rank the same."""
        raise NotImplementedError

    def steps(self, name: str) -> Tensor:
        """How often it has changed one of them."""
        raise NotImplementedError

    def own(self, name: str, key: str | None) -> Tensor:
        """This rank's part of a moment, or, without `key`, of the parameter as it is trained; no copy."""
        raise NotImplementedError

    def place(self, name: str) -> tuple[int, int]:
        """Where this rank's part begins in the whole of a parameter, laid flat, and its numbers."""
        raise NotImplementedError

    def part_of(self, name: str, whole: Tensor) -> Tensor:
        """Where in the whole of it `own` stands; a view."""
        return _piece(whole, *self.place(name)).view_as(self.own(name, None))

    def weight(self, name: str, to: int) -> Tensor:
        """A parameter, on rank `to`; on the others empty."""
        return self._gathered(name, None, self.types[name], to)

    def everywhere(self) -> dict[str, Tensor]:
        """The parameters, whole, on each rank; not beside a step."""
        return {name: self._everywhere(name).to(kind) for name, kind in self.types.items()}

    def _everywhere(self, name: str) -> Tensor:
        found = torch.zeros(self.shapes[name])
        self.part_of(name, found).copy_(self.own(name, None))
        self.ranks.add(found)
        return found

    def tensors(self) -> dict[str, Tensor]:
        """See `Optimized`; on "meta", without values: `tensor` has these."""
        return {n: t.to("meta") for n, t in self.like([f"step/{name}" for name in self.changed()]).items()}

    def tensor(self, saved: str, to: int) -> Tensor:
        """One of `tensors`, on rank `to`; on the others empty, but for steps."""
        key, _, name = saved.partition("/")
        if key == "step":
            return self.steps(name)
        kind = torch.float32 if self.wide else self.types[name]
        return self._gathered(name, None if key == MASTER else key, kind, to)

    def finite(self, weight: str = "") -> dict[str, bool]:
        """Of each parameter and its moments, whether all is that this rank has of it; on each rank the same names.

        `weight`: what the parameters' names begin with where they are stored.
        """
        found = {f"{weight}{name}": all_finite(self.own(name, None).to(kind)) for name, kind in self.types.items()}
        keys = [(key, name) for key in MOMENTS[1:] for name in self.changed()]
        return {**found, **{f"{key}/{name}": all_finite(self.own(name, key)) for key, name in keys}}

    def like(self, saved: Iterable[str]) -> dict[str, Tensor]:
        """See `Optimized`."""
        named, one = {name.partition("/")[2] for name in saved}, torch.zeros(())
        kinds = {name: torch.float32 if self.wide else kind for name, kind in self.types.items() if name in named}
        full = {name: torch.empty(self.shapes[name], dtype=kind, device="meta") for name, kind in kinds.items()}
        keys = (*MOMENTS, *([MASTER] if self.wide else []))
        return {f"{key}/{name}": one if key == "step" else full[name] for name in full for key in keys}

    def alike(self) -> dict[str, Tensor]:
        """Tensors with the names, shapes and types of the parameters, and no values."""
        return {n: torch.empty(shape, dtype=self.types[n], device="meta") for n, shape in self.shapes.items()}

    def _gathered(self, name: str, key: str | None, kind: torch.dtype, to: int) -> Tensor:
        """The whole of what `own` has parts of, in the type that it is stored in."""
        assert self.ranks.beside is not None
        own, places = self.own(name, key).reshape(-1).to("cpu", kind), self._places[name]
        found = given_back(self.shapes[name], kind) if self.ranks.rank == to else torch.empty(0, dtype=kind)
        self.ranks.beside.to_one(to, own, [_piece(found, *place) for place in places])
        return found.add_(0.0)  # no -0: a sum over ranks had none, and runs were recorded with these

    @cached_property
    def _places(self) -> dict[str, list[tuple[int, int]]]:
        """Of each parameter, `place` on every rank; found out by all of them together."""
        assert self.ranks.beside is not None
        found = torch.zeros(self.ranks.count, len(self.types), 2, dtype=torch.int64)
        found[self.ranks.rank] = torch.tensor([self.place(name) for name in self.types])
        self.ranks.beside.add(found)
        return {name: [(int(a), int(b)) for a, b in found[:, at]] for at, name in enumerate(self.types)}

    def _put_master(self, name: str, own: Tensor) -> None:
        """This rank's part of a master; where it does not round to the parameter, that stays (see `masters`)."""
        kind, now = self.types[name], self.own(name, None)
        own = own.to(now.device)
        now.copy_(torch.where(own.to(kind) == now.to(kind), own, now))


def _piece(whole: Tensor, begin: int, numbers: int) -> Tensor:
    """A view of it, laid flat."""
    return whole.reshape(-1)[begin : begin + numbers]
