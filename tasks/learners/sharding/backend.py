"""A sharding backend: it keeps parameters, gradients and moments sharded over all ranks, and gathers them on request.

    put, load --> begin --> clear --> (run, backward)* --> clip --> apply --> ... --> gather_weight, gather_tensor

- All ranks call each method here, in the same order.
- Gathered tensors have the names, shapes and types that `TrainedTensors` has on one rank. They are gathered one at a
  time: every rank sends its shard to the rank that stores the tensor, and that rank alone holds it whole.
- A new backend has the parameters' current values and no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from rollflow.tasks.learners.config import RankedTrain
from rollflow.tasks.learners.distributed.gloo_ranks import GlooRanks
from rollflow.tasks.learners.malloc_trim import given_back
from rollflow.tasks.learners.optimizer.nonfinite import all_finite
from rollflow.tasks.learners.optimizer.trained_tensors import MASTER, MOMENTS, TrainedTensors


class AnyForward(nn.Module):
    """The module that a backend wraps: it calls any function, so that decoder, head and loss are one forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, of: Callable[[], Tensor]) -> Tensor:
        """Return the result of `of`."""
        return of()


class ShardingBackend(TrainedTensors):
    """See the module's docstring."""

    def __init__(  # does not call the constructor of `TrainedTensors`
        self, model: nn.Module, config: RankedTrain, ranks: GlooRanks
    ) -> None:
        self.ranks = ranks
        given = dict(model.named_parameters())
        for parameter in given.values():
            parameter.grad = None  # left by a cold start
        self.types = {name: parameter.dtype for name, parameter in given.items()}
        self.shapes = {name: parameter.shape for name, parameter in given.items()}
        self.wide = config.master_dtype == "float32" and any(kind != torch.float32 for kind in self.types.values())

    def run(self, of: Callable[[], Tensor]) -> Tensor:
        """Return the result of `of`, with the weights gathered where `of` needs them."""
        raise NotImplementedError

    def run_backward(self, passes: Iterable[Callable[[], Tensor]]) -> list[float]:
        """Add up the gradients of the losses that `passes` return, over all ranks; return this rank's losses."""
        raise NotImplementedError

    def put(self, name: str, weight: Tensor) -> None:
        """Set a parameter to `weight`; `load` must follow, or be under way."""
        raise NotImplementedError

    def list_changed(self) -> Sequence[str]:
        """Return the names of the parameters that AdamW has changed; the same on each rank."""
        raise NotImplementedError

    def count_steps(self, name: str) -> Tensor:
        """Return the number of AdamW's steps on a changed parameter."""
        raise NotImplementedError

    def own(self, name: str, key: str | None) -> Tensor:
        """Return this rank's shard of a moment, or, if `key` is None, of the trained parameter; not a copy."""
        raise NotImplementedError

    def locate_shard(self, name: str) -> tuple[int, int]:
        """Return where this rank's shard begins in the flattened parameter, and its number of elements."""
        raise NotImplementedError

    def view_shard(self, name: str, whole: Tensor) -> Tensor:
        """Return the part of `whole` that this rank's shard covers; a view."""
        return _view_piece(whole, *self.locate_shard(name)).view_as(self.own(name, None))

    def gather_weight(self, name: str, to: int) -> Tensor:
        """Gather a parameter on rank `to`; on other ranks the result is empty."""
        return self._gather(name, None, self.types[name], to)

    def gather_everywhere(self) -> dict[str, Tensor]:
        """Gather all parameters on each rank. Not to be called beside a step."""
        return {name: self._gather_everywhere(name).to(kind) for name, kind in self.types.items()}

    def _gather_everywhere(self, name: str) -> Tensor:
        found = torch.zeros(self.shapes[name])
        self.view_shard(name, found).copy_(self.own(name, None))
        self.ranks.add(found)
        return found

    def tensors(self) -> dict[str, Tensor]:
        """See `TrainedTensors`; the tensors are on "meta", without values; see `gather_tensor`."""
        return {
            n: t.to("meta") for n, t in self.expected_tensors([f"step/{name}" for name in self.list_changed()]).items()
        }

    def gather_tensor(self, saved: str, to: int) -> Tensor:
        """Gather one of `tensors` on rank `to`; on other ranks the result is empty, except for steps."""
        key, _, name = saved.partition("/")
        if key == "step":
            return self.count_steps(name)
        kind = torch.float32 if self.wide else self.types[name]
        return self._gather(name, None if key == MASTER else key, kind, to)

    def check_finite(self, weight: str = "") -> dict[str, bool]:
        """Return for each parameter and moment True if this rank's shard is finite; each rank returns the same names.

        `weight` is the prefix that stored parameters' names have.
        """
        found = {f"{weight}{name}": all_finite(self.own(name, None).to(kind)) for name, kind in self.types.items()}
        keys = [(key, name) for key in MOMENTS[1:] for name in self.list_changed()]
        return {**found, **{f"{key}/{name}": all_finite(self.own(name, key)) for key, name in keys}}

    def expected_tensors(self, saved: Iterable[str]) -> dict[str, Tensor]:
        """See `TrainedTensors`."""
        named, one = {name.partition("/")[2] for name in saved}, torch.zeros(())
        kinds = {name: torch.float32 if self.wide else kind for name, kind in self.types.items() if name in named}
        full = {name: torch.empty(self.shapes[name], dtype=kind, device="meta") for name, kind in kinds.items()}
        keys = (*MOMENTS, *([MASTER] if self.wide else []))
        return {f"{key}/{name}": one if key == "step" else full[name] for name in full for key in keys}

    def parameters_like(self) -> dict[str, Tensor]:
        """Return tensors with the names, shapes and types of the parameters, without values."""
        return {n: torch.empty(shape, dtype=self.types[n], device="meta") for n, shape in self.shapes.items()}

    def _gather(self, name: str, key: str | None, kind: torch.dtype, to: int) -> Tensor:
        """Gather a whole tensor from the ranks' shards, in the type in which it is stored."""
        assert self.ranks.beside is not None
        own, places = self.own(name, key).reshape(-1).to("cpu", kind), self._places[name]
        found = given_back(self.shapes[name], kind) if self.ranks.rank == to else torch.empty(0, dtype=kind)
        self.ranks.beside.gather_to(to, own, [_view_piece(found, *place) for place in places])
        return found.add_(0.0)  # turns -0 into +0, as the sums over ranks in recorded runs did

    @cached_property
    def _places(self) -> dict[str, list[tuple[int, int]]]:
        """Result of `locate_shard` for each parameter on every rank; all ranks must ask for it together."""
        assert self.ranks.beside is not None
        found = torch.zeros(self.ranks.count, len(self.types), 2, dtype=torch.int64)
        found[self.ranks.rank] = torch.tensor([self.locate_shard(name) for name in self.types])
        self.ranks.beside.add(found)
        return {name: [(int(a), int(b)) for a, b in found[:, at]] for at, name in enumerate(self.types)}

    def _put_master(self, name: str, own: Tensor) -> None:
        """Set this rank's shard of a master, except where it does not round to the parameter (see `master_weights`)."""
        kind, now = self.types[name], self.own(name, None)
        own = own.to(now.device)
        now.copy_(torch.where(own.to(kind) == now.to(kind), own, now))


def _view_piece(whole: Tensor, begin: int, numbers: int) -> Tensor:
    """Return a view of elements of the flattened tensor."""
    return whole.reshape(-1)[begin : begin + numbers]
