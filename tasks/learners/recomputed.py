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
    for layer in layers_of(decoder, "train.checkpoint_activations"):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def layers_of(decoder: nn.Module, key: str) -> nn.ModuleList:
    """The longest of its lists of modules that is not within another one.

    Raises:
        ConfigError: it has none; `key` asked for them.
    """
    lists = {name: found for name, found in decoder.named_modules() if isinstance(found, nn.ModuleList)}
    outer = [found for name, found in lists.items() if not any(name.startswith(f"{other}.") for other in lists)]
    if not outer:
        raise ConfigError(f"{key} = true: no layers were found in a {type(decoder).__name__}; set it to false")
    return max(outer, key=len)
