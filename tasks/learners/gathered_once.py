"""How FSDP2 gathers parameters on a CPU: with no more beside them than has to be.

FSDP2 gathers a group of parameters into one buffer and copies each out of it, for ranks' parts of several parameters
lie there side by side.

- Of a group that is one parameter the buffer *is* the parameter, padded at its end as FSDP pads it. Embeddings are such
  a group, and the largest: 100,000 tokens of 2,048 numbers in bfloat16 are 0.4 GB.
- gloo gathers into a buffer of its own, too; its broadcasts need none, so embeddings are broadcast.
- FSDP keeps a layer's buffer until the next layer's is there, for work on a GPU may still read it; on a CPU none does.

On a GPU all is FSDP's: which of its streams may take memory that another one has freed is its to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather


def gathered_once(cut: FSDPModule) -> None:
    """From here on."""
    for group in cut._get_fsdp_state()._fsdp_param_groups:
        if group.device.type == "cpu":
            cut.set_custom_all_gather(_Gathering(group))


class _Gathering(DefaultAllGather):
    """What gathers a group of parameters, as FSDP calls it; `group` is FSDP's own."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer. Of one parameter, what FSDP copies out of it afterwards is the same memory."""
        self._group.comm_ctx.all_gather_state = None  # the layer's before
        if not self._is_one:
            return super().allocate(size, dtype=dtype, device=device)
        (parameter,) = self._group.fsdp_params
        parameter.init_all_gather_outputs([size[0]], [dtype], 1, device)
        parameter.alloc_all_gather_outputs()
        (found,) = parameter.all_gather_outputs
        return found.data  # type: ignore[no-any-return]  # no change that autograd counts, as FSDP's copy is none

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> Work | None:
        """All ranks' parts; this rank's is in its place."""
        if not self._is_one:
            return super().__call__(output_tensor, input_tensor, group, async_op)
        for rank, part in enumerate(output_tensor.chunk(group.size())):
            torch.distributed.broadcast(part, group=group, group_src=rank)
        return None

    @property
    def _is_one(self) -> bool:
        return len(self._group.fsdp_params) == 1
