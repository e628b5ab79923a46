"""Finds the files of a reward model (safetensors and a fast tokenizer) without loading the model."""

from __future__ import annotations

from pathlib import Path

from rollflow.storage.objects.base import Data
from rollflow.tasks.policies.folder import copy_folder, find_policy, weight_files, weight_paths
from rollflow.tasks.scorers.model.config import ModelReward


def find_model(config: ModelReward, section: str, download: bool = True) -> Path | None:
    """Return the local folder of a reward model, or None if the model is on the Hugging Face hub and not downloaded.

    Raises:
        ConfigError: the folder does not exist or lacks a file; the message names the config key.
    """
    folder = find_policy(config.path, download, f"{section}.path")
    if folder is not None:
        weight_paths(config.path, f"{section}.path")
    return folder


def read_model(config: ModelReward, section: str) -> dict[str, Data]:
    """Return the files of a reward model by name: config, tokenizer, and memory-mapped weights.

    Raises:
        ConfigError: the folder does not exist or lacks a file; the message names the config key.
    """
    key = f"{section}.path"
    return {**copy_folder(config.path, key), **weight_files(config.path, key)}
