"""Tests how GPUs are divided among engines and learner: with shares computed by hand, and with random requests."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollflow.flows.keepalive.gpus import GpuShares, divide_gpus
from rollflow.storage.errors import ConfigError
from rollflow.tasks.run.config import RunConfig


def config_of(replicas: int, width: int, ranks: int, evaluation: str = "auto") -> RunConfig:
    tree: dict[str, Any] = {
        "policy": {"cold_start": {}},
        "prompts": [{"kind": "reasoning-gym", "family": "chain_sum"}],
        "reward": {"kind": "exact"},
        "engine": {"kind": "vllm", "replicas": replicas, "tensor_parallel": width},
        "evaluation": {"engine": evaluation},
        "train": {"ranks": ranks},
    }
    return RunConfig.model_validate(tree)


@pytest.mark.parametrize(
    ("asked", "nodes", "shares"),
    [
        ((2, 1, 1), [], (0.0, 0.0)),
        ((2, 1, 1), [0.0, 0.0], (0.0, 0.0)),
        ((2, 1, 1), [3.0], (1.0, 1.0)),
        ((2, 1, 1), [2.0], (0.5, 0.5)),
        ((2, 1, 1), [1.0], (1 / 3, 1 / 3)),
        ((2, 1, 4), [8.0], (1.0, 4.0)),
        ((2, 2, 8), [8.0, 8.0], (2.0, 8.0)),
        ((7, 1, 1), [4.0, 4.0], (1.0, 1.0)),
    ],
)
def test_gpu_split_matches_a_hand_calculation(
    asked: tuple[int, int, int], nodes: list[float], shares: tuple[float, float]
) -> None:
    assert divide_gpus(config_of(*asked), nodes) == GpuShares(*shares)


@pytest.mark.parametrize(
    ("asked", "nodes", "sentence"),
    [
        (
            (2, 1, 16),
            [8.0, 8.0],
            "train.ranks = 16: all ranks must fit on one node, because train.multi_node is false",
        ),
        (
            (1, 4, 1),
            [2.0, 2.0],
            "engine.tensor_parallel = 4: an engine must fit on one node, but the largest node has only 2 GPUs",
        ),
        (
            (4, 1, 4),
            [7.0],
            "train.ranks = 4 and engine.tensor_parallel = 1: 4 engines and the learner need 8 GPUs, but",
        ),
    ],
)
def test_too_few_gpus_are_refused(asked: tuple[int, int, int], nodes: list[float], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        divide_gpus(config_of(*asked), nodes)
    assert str(refused.value).startswith(sentence)


@given(
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(1, 8),
    st.lists(st.sampled_from([0.0, 1.0, 4.0, 8.0]), max_size=4),
    st.sampled_from(["auto", "own"]),
)
def test_gpu_shares_never_exceed_the_number_of_gpus(
    replicas: int, width: int, ranks: int, nodes: list[float], evaluation: str
) -> None:
    """The roles that need whole GPUs all get them at the same time. With too few GPUs, the config is rejected."""
    config = config_of(replicas, width, ranks, evaluation)
    engines = replicas + (evaluation == "own" or replicas == 1)
    try:
        shares = divide_gpus(config, nodes)
    except ConfigError:
        assert max(width, ranks) > 1
        assert engines * width + ranks > sum(nodes) or max(width, ranks) > max(nodes)
        return
    if not sum(nodes):
        assert shares == GpuShares(0.0, 0.0)
        return
    assert engines * shares.engine + shares.learner <= sum(nodes) + 1e-9
    for share, asked in ((shares.engine, width), (shares.learner, ranks)):
        assert share == asked or (width == ranks == 1 and math.isclose(1 / share, round(1 / share)))
