"""Changes only those elements of a model's parameters that changed since an earlier policy version.

The folder of a policy version's weights may contain deltas, which say what to add to the bits of which elements (see
`storage.deltas.update_folder`). The parameters have the bits of the earlier version before, and get exactly the bits of
the new version.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from rollflow.storage.deltas.update_folder import ChangedTensor, list_changes
from rollflow.storage.errors import Corrupt

TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element


@torch.no_grad()
def load_changes(parameters: Mapping[str, Tensor], weights: Path, before: int, after: int) -> bool:
    """Change `parameters` from policy version `before` to version `after`. Return False if all weights must be loaded,
    because the folder `weights` does not say what changed, or because its tensors have another type than the model.

    Raises:
        Corrupt: the folder is damaged, or changes a tensor that the model does not have.
    """
    changes = list_changes(weights, before, after)
    if changes is None:
        return False
    try:
        for changed in changes:
            if changed.name not in parameters or changed.dtype not in TYPES:
                raise ValueError(
                    f"the delta changes the tensor {changed.name} of type {changed.dtype}, which the model does "
                    "not have"
                )
            parameter = parameters[changed.name]
            if parameter.dtype != TYPES[changed.dtype] or parameter.itemsize != changed.numbers.itemsize:
                return False
            _change_elements(parameter.detach().view(-1), changed)
    except (ValueError, IndexError) as error:
        raise Corrupt(f"the changed weights in {weights} cannot be loaded: {error}") from error
    return True


def _change_elements(parameter: Tensor, changed: ChangedTensor) -> None:
    bits = parameter.view(INTEGERS[parameter.itemsize])  # adding signed integers gives the same bits as unsigned ones
    where = torch.from_numpy(changed.positions).to(bits.device)
    numbers = torch.from_numpy(changed.numbers.view(f"<i{bits.itemsize}")).to(bits.device)
    if not changed.replaces:
        numbers += bits.index_select(0, where)  # three times as fast as `index_add_` on a CPU
    bits.index_copy_(0, where, numbers)
