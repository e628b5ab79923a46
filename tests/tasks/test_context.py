"""Tests of the context length and the number of probe tokens of a policy, which follow from its config.json alone."""

from __future__ import annotations

from typing import Any

import pytest

from rollflow.storage.errors import ConfigError
from rollflow.tasks.policies.context import LONGEST_PROBE, PROBE, check_window, context_length, probe_length

LONG = {"max_position_embeddings": 32768}


def scaled(kind: str, **more: object) -> dict[str, Any]:
    return {"max_position_embeddings": 2048, "rope_scaling": {"rope_type": kind, "factor": 4.0, **more}}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 128}, 128),
        ({"n_positions": 1024, "n_ctx": 512}, 1024),
        ({"max_seq_len": 2048}, 2048),
        ({"seq_length": 4096}, 4096),
        ({"n_ctx": 512}, 512),
        ({"text_config": {"max_position_embeddings": 99}, "vision_config": {"max_position_embeddings": 7}}, 99),
        (scaled("linear"), 8192),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 2.0}}, 4096),
        (scaled("linear") | {"model_type": "gemma3_text"}, 2048),  # its length already includes the factor
        (scaled("yarn", original_max_position_embeddings=512), 2048),
        (scaled("llama3", original_max_position_embeddings=512), 2048),
        (scaled("dynamic"), 2048),
        (scaled("longrope", original_max_position_embeddings=512), 512),
        (scaled("longrope") | {"original_max_position_embeddings": 256}, 256),
        ({"max_position_embeddings": 64, "rope_parameters": {"full": {"rope_type": "linear", "factor": 2}}}, 128),
    ],
)
def test_context_length_is_read_from_the_model_config(config: dict[str, Any], length: int) -> None:
    assert context_length(config) == length


@pytest.mark.parametrize("config", [{}, {"max_position_embeddings": None}, {"text_config": {"hidden_size": 8}}])
def test_model_config_without_a_context_length_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"does not say how many tokens the policy can read .*; write max_position_embeddings into it"
    ):
        context_length(config)


@pytest.mark.parametrize("value", [0, -5, 1, "128", 1.5, True, [128]])
def test_invalid_context_length_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"max_position_embeddings = .*, which must be a whole number"):
        context_length({"max_position_embeddings": value})


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (LONG, PROBE),
        ({"max_position_embeddings": 16}, 16),
        (LONG | {"sliding_window": 4096}, 4096 + PROBE),
        (LONG | {"sliding_window": 4096, "use_sliding_window": False}, PROBE),
        (LONG | {"sliding_window": None}, PROBE),
        ({"max_position_embeddings": 100, "sliding_window": 90}, 100),
        (LONG | {"sliding_window": 30000}, LONGEST_PROBE),
        (LONG | {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 1024}}, 1024 + PROBE),
        ({"text_config": LONG | {"sliding_window": 512}}, 512 + PROBE),
    ],
)
def test_probe_tokens_cover_attention_windows_and_rope_scaling(config: dict[str, Any], length: int) -> None:
    assert probe_length(config) == length


@pytest.mark.parametrize("value", [0, -4, 0.5, 1e30, "8", True, [8]])
def test_invalid_attention_window_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"sliding_window = .*, which must be a whole number above 0, or null"):
        check_window(LONG | {"text_config": {"sliding_window": value}})


@pytest.mark.parametrize("more", [{}, {"sliding_window": None}, {"sliding_window": 4096}])
def test_valid_attention_window_is_accepted(more: dict[str, Any]) -> None:
    check_window(LONG | more)


def test_unused_attention_window_is_not_checked() -> None:
    check_window(LONG | {"sliding_window": 0, "use_sliding_window": False})
