"""Activation checkpointing: each layer runs again in the backward pass, so that its activations need not be stored
(Chen et al. 2016)."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from rollflow.storage.errors import ConfigError


def recompute_layers(decoder: Any) -> None:
    """Make each layer of the decoder run again in the backward pass.

    A layer that runs again has bit-identical results, because dropout is off and layers draw no random numbers. The
    activation checkpointing of transformers needs training mode, which would turn dropout on.

    Raises:
        ConfigError: the decoder has no list of layers.
    """
    for layer in find_layers(decoder, "train.checkpoint_activations"):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def find_layers(decoder: nn.Module, key: str) -> nn.ModuleList:
    """Return the decoder's layers: its longest list of modules that is not inside another list.

    Raises:
        ConfigError: the decoder has no list of modules. The error message names `key`, the option that needs the list
            of layers.
    """
    lists = {name: found for name, found in decoder.named_modules() if isinstance(found, nn.ModuleList)}
    outer = [found for name, found in lists.items() if not any(name.startswith(f"{other}.") for other in lists)]
    if not outer:
        raise ConfigError(
            f"{key} = true: the layers of the policy's decoder, a {type(decoder).__name__}, cannot be recomputed; "
            f"set {key} = false"
        )
    return max(outer, key=len)
