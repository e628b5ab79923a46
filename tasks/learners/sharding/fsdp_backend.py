"""Sharding by torch's FSDP2: each rank keeps some rows of each parameter, of its gradient and of its AdamW moments.

    a layer: gather --> forward --> reshard
             gather --> backward --> reshard; the layer's gradient is reduced over ranks and sharded

- Memory holds at most two gathered layers at a time, and the output head.
- AdamW updates the shards in place. With master weights, the shards are float32, and gathered weights are rounded to
  the policy's data type.
- Gradients are added up in float32 after each backward pass.
- A shard consists of rows of a parameter's first dimension. Each rank has the same number of rows, except that the last
  ranks may have fewer rows or none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rollflow.storage.errors import ConfigError
from rollflow.tasks.learners.checkpoint.shards import Named
from rollflow.tasks.learners.config import TrainBase
from rollflow.tasks.learners.distributed.gloo_ranks import GlooRanks
from rollflow.tasks.learners.distributed.rank_gpus import begin_backend
from rollflow.tasks.learners.forward.activation_checkpointing import find_layers
from rollflow.tasks.learners.optimizer.trained_tensors import MASTER, TrainedTensors
from rollflow.tasks.learners.sharding.backend import AnyForward, ShardingBackend
from rollflow.tasks.learners.sharding.fsdp_cpu_patch import patch_all_gather


def begin_group(ranks: GlooRanks, device: torch.device) -> None:
    """Create the process group of FSDP; an earlier group is destroyed, because a process can have only one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    store, bound = PrefixStore("fsdp", ranks.store), timedelta(seconds=ranks.seconds)
    where: dict[str, Any] = {"store": store, "rank": ranks.rank, "world_size": ranks.count}
    torch.distributed.init_process_group(begin_backend(device, ranks.host, blocking=False), **where, timeout=bound)


class FsdpTensors(ShardingBackend):
    """The parameters of `model`, sharded by FSDP2; `trained` contains the shards of this rank."""

    def __init__(self, model: nn.Module, config: TrainBase, ranks: GlooRanks) -> None:
        super().__init__(model, config, ranks)
        self._model = model
        self._root = self._shard_model()
        parts = {name: nn.Parameter(part) for name, part in self._own_shards()}
        TrainedTensors.__init__(self, parts, config, config.learning_rate)

    def run(self, of: Callable[[], Tensor]) -> Tensor:
        """See `ShardingBackend`."""
        found: Tensor = self._root(of)
        if not found.requires_grad:
            self._root.reshard()  # without a backward pass, FSDP keeps the gathered weights
        return found

    def run_backward(self, passes: Iterable[Callable[[], Tensor]]) -> list[float]:
        """See `ShardingBackend`."""
        found = list[float]()
        for of in passes:
            loss = self.run(of)
            loss.backward()  # type: ignore[no-untyped-call]
            found.append(float(loss.detach()))
        for name, gradient in self._own_shards(of_gradients=True):
            self.trained.parameters[name].grad = gradient
        return found

    def clear(self) -> None:
        """See `TrainedTensors`."""
        super().clear()
        self._model.zero_grad()

    def clip(self) -> float:
        """See `TrainedTensors`; the norm is that of the whole gradient, over the shards of all ranks."""
        own = self.trained.parameters.values()
        square = get_total_norm([part.grad for part in own if part.grad is not None]).double().square().cpu()
        self.ranks.add(square)
        clip_grads_with_norm_(own, self.max_grad_norm, norm := square.sqrt().float())
        return float(norm)

    def put(self, name: str, weight: Tensor) -> None:
        """See `ShardingBackend`."""
        self.own(name, None).copy_(self.view_shard(name, weight))

    def list_changed(self) -> Sequence[str]:
        """See `ShardingBackend`."""
        return [name for name, part in self.trained.parameters.items() if part in self.adamw.state]

    def count_steps(self, name: str) -> Tensor:
        """See `ShardingBackend`."""
        return self.own(name, "step")

    def own(self, name: str, key: str | None) -> Tensor:
        """See `ShardingBackend`."""
        part = self.trained.parameters[name]
        found: Tensor = part if key is None else self.adamw.state[part][key]
        return found.detach()

    def locate_shard(self, name: str) -> tuple[int, int]:
        """See `ShardingBackend`."""
        shape = self.shapes[name]
        rows, numbers = -(-shape[0] // self.ranks.count), shape[1:].numel()
        begin, end = (min(rank * rows, shape[0]) for rank in (self.ranks.rank, self.ranks.rank + 1))
        return begin * numbers, (end - begin) * numbers

    @torch.no_grad()
    def load(self, given: Named) -> None:
        """See `TrainedTensors`. Master weights are loaded after all other tensors, because reading `given` may also
        load weights.
        """
        self.clear()
        masters = dict[str, Tensor]()
        super().load(self._split_off_masters(given, masters))
        for name, own in masters.items():
            self._put_master(name, own)

    def _split_off_masters(self, given: Named, masters: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's shards of the saved tensors; shards of master weights are put into `masters` instead."""
        for saved, value in given:
            key, _, name = saved.partition("/")
            if key == MASTER:
                # The shard is copied, because a view of the file would keep the whole file in memory.
                masters[name] = self.view_shard(name, value).clone()
            else:
                yield saved, value if key == "step" else self.view_shard(name, value)
            del value  # free the memory of the file before the next file is read

    def _shard_model(self) -> Any:
        """Shard the model with FSDP: first modules whose data type differs from most modules, then layers and modules
        that FSDP can gather alone, then the other parameters.
        """
        root = AnyForward(self._model).eval()
        device = next(self._model.parameters()).device
        mesh = init_device_mesh(device.type, (self.ranks.count,))
        layers = find_layers(self._model, "train.sharded")
        first, separate = _other_type_modules(self._model), _separate_modules(self._model, layers)
        for module in dict.fromkeys([*first, *layers, *separate, root]):
            self._shard_module(module, mesh)
        return root

    def _shard_module(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Shard those parameters of a module that are not sharded yet."""
        given = [parameter for parameter in module.parameters() if not isinstance(parameter, DTensor)]
        if len(types := {parameter.dtype for parameter in given}) > 1:
            why = f"the policy's {type(module).__name__} has parameters of several data types"
            raise ConfigError(f"train.sharded = true: {why}; set train.sharded = false")
        policy = MixedPrecisionPolicy(next(iter(types), None), torch.float32, cast_forward_inputs=False)
        for parameter in given if self.wide else ():
            parameter.data = parameter.data.float()
        cut: FSDPModule = fully_shard(module, mesh=mesh, mp_policy=policy)
        # Gradients are added up instead of averaged, because losses are weighted over the whole minibatch.
        cut.set_gradient_divide_factor(1.0)
        cut.set_force_sum_reduction_for_comms(True)
        patch_all_gather(cut)

    def _own_shards(self, *, of_gradients: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's shards of the parameters by name; with `of_gradients`, yield the shards of existing
        gradients instead.
        """
        for name, parameter in self._model.named_parameters():
            found: Any = parameter.grad if of_gradients else parameter.detach()
            if found is not None:
                yield name, found.to_local()


def _separate_modules(model: nn.Module, layers: nn.ModuleList) -> list[nn.Module]:
    """Return modules outside the layers that FSDP can gather alone: norms, and embeddings that are not tied to the
    output head.

    The output head cannot be gathered alone, because its weight is read outside its forward pass (`policies/head.py`).
    A module with child modules cannot be gathered alone, because its children would be gathered twice.
    """
    inner, owners = {*layers.modules()}, Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    outer = [(m, [*m.parameters(recurse=False)]) for m in model.modules() if m not in inner and not [*m.children()]]
    return [
        module
        for module, own in outer
        if own and all(p.dim() == 1 or (isinstance(module, nn.Embedding) and owners[id(p)] == 1) for p in own)
    ]


def _other_type_modules(model: nn.Module) -> list[nn.Module]:
    """Return modules whose parameters do not have the most frequent data type, because an FSDP group must have one
    type."""
    kinds = {m: {p.dtype for p in m.parameters(recurse=False)} for m in model.modules()}
    every = [kind for found in kinds.values() for kind in found]
    most = max(every, key=every.count)
    return [module for module, found in kinds.items() if found - {most}]
