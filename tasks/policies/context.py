"""Computes from `config.json` the context length of a policy, and the length of the probe (the prompt that checks
weight updates).

This module imports neither torch nor transformers, so that it is imported fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rollflow.storage.errors import ConfigError

# keys of config.json that may contain the context length, depending on the architecture
NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "n_ctx",
    "max_sequence_length",
    "max_seq_length",
    "model_max_length",
)
ORIGINAL = "original_max_position_embeddings"
# smallest number of tokens of the probe, and number of tokens by which the probe exceeds a sliding window
PROBE = 32
# largest number of tokens of the probe; a longer probe would take longer than a training step
LONGEST_PROBE = 8448


def context_length(config: Mapping[str, Any]) -> int:
    """Return the largest number of tokens of a prompt and its response for which learner and engines compute equal
    log-probs.

    Linear RoPE scaling multiplies the context length by the scaling factor. With LongRoPE, the limit is the model's
    original context length, because the scaling factors change there. With dynamic RoPE scaling, the limit is the
    length in the config, because in longer sequences a log-prob depends on later tokens.

    Raises:
        ConfigError: the config names no context length.
    """
    text = text_config(config)
    named = ((name, text.get(name)) for name in NAMES)
    found = next(((name, value) for name, value in named if value is not None), None)
    if found is None:
        raise ConfigError(
            "policy.path: the policy's config.json does not say how many tokens the policy can read (none of "
            f"{', '.join(NAMES)}); write max_position_embeddings into it, or choose another policy"
        )
    name, value = found
    if type(value) is not int or value < 2:
        raise ConfigError(
            f"policy.path: the policy's config.json has {name} = {value!r}, which must be a whole number above 1; "
            "correct it"
        )
    for scaling in _scalings(text):
        kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
        if kind == "linear" and isinstance(factor, int | float) and "gemma3" not in str(text.get("model_type")):
            return max(value, int(value * factor))
        if kind == "longrope":
            return min(value, _original_length(text, scaling) or value)
    return value


def probe_length(config: Mapping[str, Any]) -> int:
    """Return the number of tokens of the prompt that checks an engine's weights after a weight update.

    The probe is longer than the policy's sliding window, and longer than the length above which RoPE positions are
    scaled. The probe has at most `LONGEST_PROBE` tokens and fits into the policy's context.
    """
    text = text_config(config)
    windows = [_window(text)]
    scaled = [_original_length(text, scaling) for scaling in _scalings(text)]
    seen = [length + PROBE for length in (*windows, *scaled) if type(length) is int and length > 0]
    return max(2, min(max([PROBE, *seen]), LONGEST_PROBE, context_length(config)))


def check_window(config: Mapping[str, Any]) -> None:
    """Reject a config whose sliding window is not a number of tokens.

    Raises:
        ConfigError: the sliding window is not a whole number above 0.
    """
    window = _window(text_config(config))
    if window is not None and (type(window) is not int or window < 1):
        raise ConfigError(
            f"policy.path: the policy's config.json has sliding_window = {window!r}, which must be a whole number "
            "above 0, or null"
        )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with the keys of the text model at the top level, because some configs nest these keys in
    `text_config`.
    """
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, Mapping) else config


def _window(text: Mapping[str, Any]) -> Any:
    """Return the size of the sliding window in tokens, or None if the config uses no sliding window."""
    return text.get("sliding_window") if text.get("use_sliding_window", True) else None


def _scalings(text: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the RoPE scalings in the config; each kind of layer may have its own scaling."""
    for name in ("rope_parameters", "rope_scaling"):
        found = text.get(name)
        if isinstance(found, Mapping):
            nested = [part for part in found.values() if isinstance(part, Mapping)]
            yield from nested or [found]


def _original_length(text: Mapping[str, Any], scaling: Mapping[str, Any]) -> int | None:
    """Return the sequence length above which RoPE positions are scaled, or None if the config does not name it."""
    found = scaling.get(ORIGINAL, text.get(ORIGINAL))
    return found if type(found) is int and found > 0 else None
