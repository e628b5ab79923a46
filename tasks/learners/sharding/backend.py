"""A sharding backend keeps parameters, gradients and AdamW moments sharded over all ranks, and gathers tensors on
request.

    put, load --> begin --> clear --> (run, backward)* --> clip --> apply --> ... --> gather_weight, gather_tensor

- All ranks must call the methods of a sharding backend in the same order.
- Gathered tensors have the same names, shapes and types as in a learner with one rank (`TrainedTensors`). A tensor is
  gathered on one rank, and no other rank holds the whole tensor.
- A new sharding backend starts with the current values of the parameters and without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from rollflow.tasks.learners.config import TrainBase
from rollflow.tasks.learners.distributed.gloo_ranks import GlooRanks
from rollflow.tasks.learners.malloc_trim import given_back
from rollflow.tasks.learners.optimizer.nonfinite import all_finite
from rollflow.tasks.learners.optimizer.trained_tensors import MASTER, MOMENTS, TrainedTensors


class AnyForward(nn.Module):
    """A torch module whose forward pass calls the function that is passed to it. Wrapping the decoder, the output head
    and the loss in one module lets a backend run them in one forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, of: Callable[[], Tensor]) -> Tensor:
        """Return the result of `of`."""
        return of()


class ShardingBackend(TrainedTensors):
    """Trained parameters whose values, gradients and AdamW moments are sharded over ranks."""

    def __init__(  # does not call the constructor of `TrainedTensors`, because subclasses create AdamW themselves
        self, model: nn.Module, config: TrainBase, ranks: GlooRanks
    ) -> None:
        self.ranks = ranks
        given = dict(model.named_parameters())
        for parameter in given.values():
            parameter.grad = None  # a cold start (supervised training) may have left a gradient
        self.types = {name: parameter.dtype for name, parameter in given.items()}
        self.shapes = {name: parameter.shape for name, parameter in given.items()}
        self.wide = config.master_dtype == "float32" and any(kind != torch.float32 for kind in self.types.values())

    def run(self, of: Callable[[], Tensor]) -> Tensor:
        """Call `of` and return its result; the weights that `of` uses are gathered from all ranks."""
        raise NotImplementedError

    def run_backward(self, passes: Iterable[Callable[[], Tensor]]) -> list[float]:
        """Run each function of `passes` forward and backward, and add up the gradients over all ranks; return the
        losses of this rank."""
        raise NotImplementedError

    def put(self, name: str, weight: Tensor) -> None:
        """Set a parameter to the whole tensor `weight`. The caller must call `load` afterwards."""
        raise NotImplementedError

    def list_changed(self) -> Sequence[str]:
        """Return the names of the parameters that AdamW has updated, the same on each rank."""
        raise NotImplementedError

    def count_steps(self, name: str) -> Tensor:
        """Return the number of optimizer steps that AdamW has taken on the parameter `name`."""
        raise NotImplementedError

    def own(self, name: str, key: str | None) -> Tensor:
        """Return this rank's shard of the AdamW moment `key`, or of the trained parameter if `key` is None, without a
        copy."""
        raise NotImplementedError

    def locate_shard(self, name: str) -> tuple[int, int]:
        """Return the offset of this rank's shard in the flattened parameter, and the number of elements of the
        shard."""
        raise NotImplementedError

    def view_shard(self, name: str, whole: Tensor) -> Tensor:
        """Return a view of the part of the tensor `whole` that belongs to this rank's shard."""
        return _view_piece(whole, *self.locate_shard(name)).view_as(self.own(name, None))

    def gather_weight(self, name: str, to: int) -> Tensor:
        """Gather a parameter on rank `to`; on other ranks, return an empty tensor."""
        return self._gather(name, None, self.types[name], to)

    def gather_everywhere(self) -> dict[str, Tensor]:
        """Gather all parameters on every rank. All ranks must call `gather_everywhere` together, outside of train
        steps."""
        return {name: self._gather_everywhere(name).to(kind) for name, kind in self.types.items()}

    def _gather_everywhere(self, name: str) -> Tensor:
        found = torch.zeros(self.shapes[name])
        self.view_shard(name, found).copy_(self.own(name, None))
        self.ranks.add(found)
        return found

    def tensors(self) -> dict[str, Tensor]:
        """See `TrainedTensors`. The tensors have no values (they are on torch's "meta" device); `gather_tensor` gathers
        the values.
        """
        return {
            n: t.to("meta") for n, t in self.expected_tensors([f"step/{name}" for name in self.list_changed()]).items()
        }

    def gather_tensor(self, saved: str, to: int) -> Tensor:
        """Gather a saved tensor on rank `to`; on other ranks, return an empty tensor. A number of optimizer steps is
        returned on every rank.
        """
        key, _, name = saved.partition("/")
        if key == "step":
            return self.count_steps(name)
        kind = torch.float32 if self.wide else self.types[name]
        return self._gather(name, None if key == MASTER else key, kind, to)

    def check_finite(self, weight: str = "") -> dict[str, bool]:
        """Return, for each parameter and AdamW moment, whether this rank's shard is free of NaN and infinity.

        All ranks return the same names; `weight` is a prefix for the names of parameters.
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
        """Return tensors with the names, shapes and types of the parameters, but without values."""
        return {n: torch.empty(shape, dtype=self.types[n], device="meta") for n, shape in self.shapes.items()}

    def _gather(self, name: str, key: str | None, kind: torch.dtype, to: int) -> Tensor:
        """Gather a whole tensor from the shards of all ranks, in the data type in which the tensor is saved."""
        assert self.ranks.beside is not None
        own, places = self.own(name, key).reshape(-1).to("cpu", kind), self._places[name]
        found = given_back(self.shapes[name], kind) if self.ranks.rank == to else torch.empty(0, dtype=kind)
        self.ranks.beside.gather_to(to, own, [_view_piece(found, *place) for place in places])
        return found.add_(0.0)  # -0 is turned into +0, so that replays of recorded runs give the same bits

    @cached_property
    def _places(self) -> dict[str, list[tuple[int, int]]]:
        """Offset and size of every rank's shard of each parameter. All ranks must read `_places` at the same time."""
        assert self.ranks.beside is not None
        found = torch.zeros(self.ranks.count, len(self.types), 2, dtype=torch.int64)
        found[self.ranks.rank] = torch.tensor([self.locate_shard(name) for name in self.types])
        self.ranks.beside.add(found)
        return {name: [(int(a), int(b)) for a, b in found[:, at]] for at, name in enumerate(self.types)}

    def _put_master(self, name: str, own: Tensor) -> None:
        """Set this rank's shard of a master weight to `own`, except where `own` does not round to the parameter's
        value."""
        kind, now = self.types[name], self.own(name, None)
        own = own.to(now.device)
        now.copy_(torch.where(own.to(kind) == now.to(kind), own, now))


def _view_piece(whole: Tensor, begin: int, numbers: int) -> Tensor:
    """Return a view of `numbers` elements of the flattened tensor `whole`, starting at element `begin`."""
    return whole.reshape(-1)[begin : begin + numbers]
