"""Builds inference engines; `base` has the contract of all engines.

`build_engine` imports only the engine backend that the config names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rollflow.tasks.engines.base import Engine
from rollflow.tasks.engines.config import EngineConfig, TimedEngineConfig, TransformersEngineConfig, VllmEngineConfig
from rollflow.tasks.engines.speculation import ReadPast


def build_engine(
    config: EngineConfig,
    policy_folder: Path | None,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    seeded: bool = False,
    told_as: str = "",
    read_past: ReadPast | None = None,
) -> Engine:
    """Build the inference engine that `config` describes, without starting the engine.

    Args:
        policy_folder: this folder contains the policy's `config.json`. The engine's first update loads the weights.
            The folder may be None for a timed engine, which then decodes each token as one Unicode code point.
        seeded: if True, the engine uses the seed of each request, even if that costs speed.
        told_as: the name under which vLLM reports its metrics to Ray; if it is "", vLLM reports no metrics.
        read_past: this function returns new past responses, from which a vLLM engine with `speculation = "suffix"`
            drafts tokens.
    """
    match config:
        case TimedEngineConfig():
            from rollflow.tasks.engines.timed import TimedEngine

            return TimedEngine(config, policy_folder)
        case VllmEngineConfig():
            from rollflow.tasks.engines.vllm.engine import VllmEngine

            folder = _require_folder(policy_folder)
            return VllmEngine(config, folder, dtype=dtype, seeded=seeded, told_as=told_as, read_past=read_past)
        case TransformersEngineConfig():
            from rollflow.tasks.engines.transformers import TransformersEngine

            return TransformersEngine(config, _require_folder(policy_folder), dtype=dtype)


def _require_folder(policy_folder: Path | None) -> Path:
    if policy_folder is None:
        raise ValueError(
            "this engine runs a model, so it needs the folder of the policy; give the folder that contains config.json"
        )
    return policy_folder
