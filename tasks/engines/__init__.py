"""Engines: one contract (`base`), one file for each backend. `build_engine` imports only the backend that it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rollflow.tasks.engines.base import Engine
from rollflow.tasks.engines.config import EngineConfig, TimedEngineConfig, TransformersEngineConfig, VllmEngineConfig


def build_engine(
    config: EngineConfig,
    policy_folder: Path | None,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    seeded: bool = False,
    told_as: str = "",
) -> Engine:
    """Build the engine of the kind that `config` names; the engine is not started.

    Args:
        policy_folder: folder with the policy's `config.json`; the first update loads the weights. If the folder is
            None, which only a timed engine allows, each token is decoded as one Unicode code point.
        seeded: the engine must use the seed of each request, even if that costs speed.
        told_as: the name under which vLLM reports its metrics to Ray; "" to report none.
    """
    match config:
        case TimedEngineConfig():
            from rollflow.tasks.engines.timed import TimedEngine

            return TimedEngine(config, policy_folder)
        case VllmEngineConfig():
            from rollflow.tasks.engines.vllm import VllmEngine

            return VllmEngine(config, _require_folder(policy_folder), dtype=dtype, seeded=seeded, told_as=told_as)
        case TransformersEngineConfig():
            from rollflow.tasks.engines.transformers import TransformersEngine

            return TransformersEngine(config, _require_folder(policy_folder), dtype=dtype)


def _require_folder(policy_folder: Path | None) -> Path:
    if policy_folder is None:
        raise ValueError(
            "this engine runs a model and needs the folder of the policy; give the folder that contains config.json"
        )
    return policy_folder
