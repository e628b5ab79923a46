"""Tests the limit of a process's memory, and which reward workers have such a limit."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rollflow.tasks.scorers.config import CodeReward, CompositeReward, ExactReward, ImportReward, RewardConfig
from rollflow.tasks.scorers.worker import is_bounded

TAKES = "from rollflow.tasks.runtime.memory_limit import limit_memory; limit_memory(2**26); print(len(bytes({})))"


@pytest.mark.parametrize(("size", "code"), [(2**20, 0), (2**28, 1)])
def test_allocation_beyond_the_memory_limit_fails(size: int, code: int) -> None:
    found = subprocess.run([sys.executable, "-c", TAKES.format(size)], capture_output=True, text=True, check=False)
    assert found.returncode == code
    assert ("MemoryError" in found.stderr) == bool(code)


@pytest.mark.parametrize(
    ("config", "bounded"),
    [
        (ExactReward(), True),
        (CompositeReward.model_validate({"parts": {"m": {"scorer": {"kind": "maths"}}}}), True),
        (CompositeReward.model_validate({"parts": {"m": {"scorer": {"kind": "code"}}}}), False),
        (CodeReward(), False),
        (ImportReward(path="mine:score"), False),
    ],
)
def test_only_built_in_text_verifiers_have_a_memory_limit(config: RewardConfig, bounded: bool) -> None:
    assert is_bounded(config) is bounded
