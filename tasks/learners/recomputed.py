"""Layers that are run again in the backward pass instead of keeping what they computed (Chen et al. 2016)."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from rollflow.storage.errors import ConfigError


def recompute_layers(decoder: Any) -> None:
    """Do so with each of the decoder's layers. The same bits come out: a layer draws nothing, since dropout is off.

    A model's own switch for it needs training mode, which would switch dropout on.

    Raises:
        ConfigError: the decoder has no list of layers.
    """
    layers = max((m for m in decoder.modules() if isinstance(m, nn.ModuleList)), key=len, default=None)
    if layers is None:
        raise ConfigError(
            f"train.checkpoint_activations = true: no layers were found in a {type(decoder).__name__}; set it to false"
        )
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
