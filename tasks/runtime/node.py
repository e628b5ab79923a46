"""What belongs to one node: the folder for what it fetches. A path of another node means nothing here."""

from __future__ import annotations

import os
import platform
import stat
import tempfile
from pathlib import Path

from rollflow.storage.errors import ConfigError


def node_cache() -> Path:
    """Where this node keeps what it fetches.

    Raises:
        ConfigError: no folder can be used.
    """
    return cache_in(_home())


def cache_in(home: Path) -> Path:
    """The node's cache below a home. The home may lie on a file system that nodes share."""
    return home / "fetched" / (platform.node() or "node")


def _home() -> Path:
    """`ROLLFLOW_HOME`; without it `~/.rollflow`, or where that cannot be written a folder for temporary files."""
    if given := os.environ.get("ROLLFLOW_HOME"):
        return Path(given).expanduser().absolute()
    own = Path(os.path.expanduser("~/.rollflow"))  # as it stands for a user without a home; `Path` would raise
    return own if own.is_absolute() and _writable(own) else _temporary()


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _temporary() -> Path:
    """A folder whose name anybody can guess: nobody else may have made it, or write there."""
    folder = Path(tempfile.gettempdir(), f"rollflow-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(
            f"ROLLFLOW_HOME: there is none, and {folder} cannot be made ({error.strerror}); set it"
        ) from None
    if found.st_uid != os.getuid() or found.st_mode & 0o022 or not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"ROLLFLOW_HOME: there is none, and {folder} is not this user's alone; set it")
    return folder
