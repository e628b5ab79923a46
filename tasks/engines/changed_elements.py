"""Loads only those elements of a model's parameters that changed since an earlier policy version.

The folder of a policy version's weights may contain deltas, which say which elements changed (see
`storage.deltas.update_folder`). The new values come from the folder's weight files, so the model has the same bits as
after a load of all weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from rollflow.storage.deltas.update_folder import ChangedTensor, list_changes
from rollflow.storage.errors import Corrupt

TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


@torch.no_grad()
def load_changes(parameters: Mapping[str, Tensor], weights: Path, before: int, after: int) -> bool:
    """Load the elements that changed from policy version `before` to version `after` into `parameters`; return False if
    the folder `weights` does not say which elements changed.

    Raises:
        Corrupt: the folder is damaged, or contains a changed tensor that the model does not have.
    """
    changes = list_changes(weights, before, after)
    if changes is None:
        return False
    try:
        for changed in changes:
            if changed.name not in parameters or changed.dtype not in TYPES:
                raise ValueError(f"the model has no tensor {changed.name} of type {changed.dtype}")
            _load_elements(parameters[changed.name], changed)
    except (ValueError, IndexError) as error:
        raise Corrupt(f"the changed weights in {weights} cannot be loaded: {error}") from error
    return True


def _load_elements(parameter: Tensor, changed: ChangedTensor) -> None:
    bits = torch.from_numpy(changed.values.view(f"<i{changed.values.itemsize}"))
    values = bits.view(TYPES[changed.dtype]).to(parameter.device, parameter.dtype)
    where = torch.from_numpy(changed.positions).to(parameter.device)
    parameter.detach().view(-1).index_copy_(0, where, values)
