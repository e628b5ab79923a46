"""Shards a learner's tensors with DeepSpeed: ZeRO 1 shards AdamW moments, ZeRO 2 also gradients, and ZeRO 3 also
weights.

DeepSpeed adds up and clips gradients, and takes optimizer steps; checkpoints are safetensors files. A rank's shard of a
tensor is a contiguous piece of the flattened tensor, or nothing.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from rollflow.tasks.learners.checkpoint.shards import Named
from rollflow.tasks.learners.config import DeepSpeedTrain
from rollflow.tasks.learners.distributed.gloo_ranks import GlooRanks
from rollflow.tasks.learners.distributed.rank_gpus import begin_backend
from rollflow.tasks.learners.optimizer.trained_tensors import MASTER, MOMENTS, group_by_decay
from rollflow.tasks.learners.sharding.backend import AnyForward, ShardingBackend

# name of DeepSpeed's operation for sums over processes, which would be compiled at its first use
SHARED_MEMORY = "deepspeed_shm_comm"


def begin_group(ranks: GlooRanks, device: torch.device) -> None:
    """Create the process group of DeepSpeed; an earlier group is destroyed, because a process can have only one."""
    backend = begin_backend(device, ranks.host, blocking=False)
    local = ranks.rank if device.type == "cpu" else 0  # a rank sees only its own GPU
    os.environ |= {"DS_ACCELERATOR": device.type, "MASTER_ADDR": ranks.host, "MASTER_PORT": "0"}
    os.environ |= {"RANK": str(ranks.rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(ranks.count)}
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Replaced
    from deepspeed.utils import groups, logger

    logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # raised at each call
    deepspeed.ops.__compatible_ops__[SHARED_MEMORY] = False
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    groups._WORLD_GROUP = deepspeed.comm.comm.cdb = None
    # An earlier ZeRO 3 engine may have replaced `linear` in the whole process; this would change the order of sums in
    # ZeRO 2.
    torch.nn.functional.linear = getattr(Replaced, "linear_bk", torch.nn.functional.linear)
    store, bound = PrefixStore("deepspeed", ranks.store), timedelta(seconds=ranks.seconds)
    torch.distributed.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.count, timeout=bound)
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=bound)


class DeepSpeedTensors(ShardingBackend):
    """The parameters of `model`, sharded and trained by a DeepSpeed engine."""

    def __init__(self, model: nn.Module, config: DeepSpeedTrain, ranks: GlooRanks) -> None:
        import deepspeed

        super().__init__(model, config, ranks)
        self.zero, self.fused, self.given = config.zero, config.fused_adamw, dict(model.named_parameters())
        groups = group_by_decay(self.given.values(), config)
        adamw = torch.optim.AdamW(groups, betas=config.betas, fused=config.fused_adamw)
        options = merge_options(config.options, set_options(config))
        self.engine, *_ = deepspeed.initialize(model=AnyForward(model).eval(), optimizer=adamw, config=options)
        self.zeroed: Any = self.engine.optimizer
        self.step = 0.0  # number of optimizer steps so far
        self._dirty = False  # True if the parameters have a gradient

    def run(self, of: Callable[[], Tensor]) -> Tensor:
        """See `ShardingBackend`."""
        if self.zero == 3 and not (order := self.zeroed._get_param_coordinator()).is_invalid_trace():
            order._invalidate_trace()  # a pass may run modules in another order than the previous pass
        found: Tensor = self.engine(of)
        return found

    def run_backward(self, passes: Iterable[Callable[[], Tensor]]) -> list[float]:
        """See `ShardingBackend`.

        With ZeRO 2 and 3 each rank keeps only its shard of each pass's gradient. DeepSpeed adds up gradients over the
        ranks at the pass that is marked as the last. DeepSpeed averages over ranks, but a learner's loss is weighted
        over the whole minibatch. So the loss is multiplied by the number of ranks.
        """
        given, found = list(passes), list[float]()
        for number, of in enumerate(given, 1):
            self._dirty = True
            self.engine.set_gradient_accumulation_boundary(number == len(given))
            loss = self.run(of)
            self.engine.backward(loss * self.ranks.count, scale_wrt_gas=False)
            found.append(float(loss.detach()))
        return found

    def begin(self, rate: float) -> None:
        """See `TrainedTensors`."""
        for group in self.zeroed.param_groups:
            group["lr"] = rate

    def clear(self) -> None:
        """See `TrainedTensors`."""
        if not self._dirty:
            return
        self.zeroed.zero_grad()
        if self.zero < 3:
            self.zeroed.micro_step_id = -1
            self.zeroed._release_preflattened_grad_buffers()
            for part in self.zeroed.averaged_gradients:
                self.zeroed.averaged_gradients[part] = self.zeroed.all_grad_tensors[part] = None
        self._dirty = False

    def clip(self) -> float:
        """Return the norm of the gradient; `apply` scales the gradient down later."""
        if not self._dirty:
            return 0.0
        from deepspeed.runtime.utils import combine_grad_norm_groups

        zeroed = self.zeroed
        norm = zeroed.scaled_global_norm() if self.zero < 3 else combine_grad_norm_groups(zeroed._get_norm_groups())
        # DeepSpeed returns -1 if the norm is a NaN or an infinity.
        return float(norm) if norm >= 0 else float("nan")

    def apply(self) -> None:
        """See `TrainedTensors`. Do nothing if no rank has a gradient."""
        if self._dirty:
            self.engine.step()
            self.step += 1
            self._dirty = False

    def put(self, name: str, weight: Tensor) -> None:
        """See `ShardingBackend`."""
        self.own(name, None).copy_(self.view_shard(name, weight))
        self._put_policy(self.given[name], weight)

    def list_changed(self) -> Sequence[str]:
        """See `ShardingBackend`."""
        return list(self.given) if self.step else []

    def count_steps(self, name: str) -> Tensor:
        """See `ShardingBackend`; the number of steps is the same for all parameters."""
        return torch.tensor(self.step)

    def own(self, name: str, key: str | None) -> Tensor:
        """See `ShardingBackend`."""
        if (part := self._part(name)) is None:
            return torch.empty(0)
        flat, begin, _, numbers = part
        source: Tensor = flat if key is None else self.zeroed.optimizer.state[flat][key]
        return source.detach()[begin : begin + numbers]

    def locate_shard(self, name: str) -> tuple[int, int]:
        """See `ShardingBackend`."""
        _, _, begin, numbers = self._part(name) or (None, 0, 0, 0)
        return begin, numbers

    def load(self, given: Named) -> None:
        """See `TrainedTensors`."""
        self.clear()
        kept, self.step = self.zeroed.optimizer.state, 0.0
        kept.clear()
        for saved, value in given:
            key, _, name = saved.partition("/")
            for flat in () if kept else self._flats():
                kept[flat] = {moment: torch.zeros_like(flat) for moment in MOMENTS[1:]}
            if key == "step":
                self.step = float(value)
            elif key == MASTER:
                self._put_master(name, self.view_shard(name, value))
            else:
                self.own(name, key).copy_(self.view_shard(name, value))
            del value  # free the memory of the file before the next file is read
        for flat, of_flat in kept.items():
            of_flat["step"] = torch.tensor(self.step, device=flat.device if self.fused else "cpu")

    def _flats(self) -> list[Tensor]:
        """Return the flat tensors that AdamW updates on this rank."""
        found: list[Tensor] = (
            self.zeroed.single_partition_of_fp32_groups if self.zero < 3 else self.zeroed.fp32_partitioned_groups_flat
        )
        return found

    def _part(self, name: str) -> tuple[Tensor, int, int, int] | None:
        """Return the position of this rank's shard of a parameter, or None if the rank has no shard of it.

        The position has four parts: a tensor of `_flats`, the shard's offset in the tensor, its offset in the
        parameter, and its number of elements.
        """
        parameter: Any = self.given[name]
        if self.zero < 3:
            part = parameter._hp_mapping
            if part is None:
                return None
            begins = part.hp_fragment_address.start, part.lp_fragment_address.start
            return self._flats()[part.param_group_index], *begins, part.lp_fragment_address.numel
        group, begin, size = self.zeroed.grad_position[self.zeroed.get_param_id(parameter)]
        first = self.ranks.rank * size
        numbers = min(size, parameter.ds_numel - first)
        return (self._flats()[group], begin, first, numbers) if numbers > 0 else None

    @torch.no_grad()
    def _put_policy(self, parameter: Any, value: Tensor) -> None:
        """Set a parameter of the model to `value`.

        With ZeRO 3, this rank's shard is set. A parameter that DeepSpeed keeps whole on each rank is also set as a
        whole.
        """
        if self.zero < 3:
            parameter.copy_(value)
            return
        first = self.ranks.rank * parameter.ds_tensor.ds_numel
        own = value.reshape(-1)[first : first + parameter.ds_tensor.ds_numel]
        parameter.ds_tensor.data[: len(own)] = own
        if parameter.numel() == parameter.ds_numel:
            parameter.data.copy_(value)


def set_options(config: DeepSpeedTrain) -> dict[str, Any]:
    """Return the DeepSpeed options that rollflow sets.

    DeepSpeed's bfloat16 mode is off, because it would change the optimizer of ZeRO 1.
    """
    return {
        "train_batch_size": config.ranks,
        "train_micro_batch_size_per_gpu": 1,  # rollflow builds the micro-batches itself, outside of DeepSpeed
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm,
        "zero_optimization": {"stage": config.zero, **_offload_options(config)},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 2**31,
    }


def _offload_options(config: DeepSpeedTrain) -> dict[str, Any]:
    """Return DeepSpeed's options for offloading to CPU memory. Pinned memory is not used, because it only speeds up
    copies to a GPU."""
    keys = {"none": (), "optimizer": ("offload_optimizer",), "all": ("offload_optimizer", "offload_param")}
    return {key: {"device": "cpu", "pin_memory": False} for key in keys[config.offload]}


def merge_options(given: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two trees of options; a value in `own` replaces a value in `given`."""
    inner = {n: merge_options(given.get(n, {}), part) for n, part in own.items() if isinstance(part, Mapping)}
    return {**given, **own, **inner}
