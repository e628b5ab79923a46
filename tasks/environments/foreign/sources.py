"""Finds and hashes the source files of an environment that runs in worker processes, without importing them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path

from rollflow.tasks.environments.foreign.config import ForeignEnvironment

PATHS = ("path", "observe", "act")  # config keys whose values may be import paths
SECONDS = 30.0  # longest wait for an interpreter's list of module folders


def hash_sources(config: ForeignEnvironment) -> str:
    """Return the SHA-256 of the source file that an environment's import path names. For several files, the result is
    the SHA-256 of their hashes. The result is "" if the config names no file, or if a file is not found.
    """
    modules = dict.fromkeys(str(path).partition(":")[0] for key in PATHS if (path := config.spec.get(key)))
    folders = [Path(folder) for folder in _list_folders(config)] if modules else []
    hashes = dict.fromkeys(_hash_module(module, folders) for module in modules)
    if not hashes or "" in hashes:
        return ""
    return next(iter(hashes)) if len(hashes) == 1 else sha256("".join(hashes).encode()).hexdigest()


def find_module(name: str, folders: Iterable[Path]) -> Path | None:
    """Return the source file of a module in the first folder that contains the module; None if no folder contains
    it."""
    *packages, last = name.split(".")
    places = list(folders)
    for package in packages:
        places = [place / package for place in places if (place / package).is_dir()]
    files = (file for place in places for file in (place / last / "__init__.py", place / f"{last}.py"))
    return next((file for file in files if file.is_file()), None)


def _hash_module(name: str, folders: Sequence[Path]) -> str:
    file = find_module(name, folders)
    try:
        return sha256(file.read_bytes()).hexdigest() if file else ""
    except OSError:  # the file cannot be read
        return ""


def _list_folders(config: ForeignEnvironment) -> list[str]:
    """Return the folders in which the environment's Python interpreter looks for modules."""
    own = [config.folder] if config.folder else []
    return [*own, *(_ask_folders(config.interpreter) if config.interpreter else [path for path in sys.path if path])]


def _ask_folders(python: str) -> list[str]:
    """Start another Python interpreter, and return the folders in which it looks for modules."""
    command = [python, "-c", "import json, sys; print(json.dumps(sys.path[1:]))"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        asked = subprocess.run(command, capture_output=True, timeout=SECONDS, env=environment, check=True)
        found = json.loads(asked.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    return [str(folder) for folder in found]
