"""Finds the folder in which this cluster node keeps fetched files, and this node's network interfaces."""

from __future__ import annotations

import os
import platform
import stat
import tempfile
from pathlib import Path

import psutil

from rollflow.storage.errors import ConfigError


def node_cache() -> Path:
    """Return the folder in which this cluster node keeps files fetched from storage.

    Raises:
        ConfigError: there is no folder that this process can write.
    """
    return cache_in(_find_home())


def find_interface(address: str) -> str | None:
    """Return the name of the network interface that has this address, or None if no interface has the address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address == address for found in addresses):
            return str(name)
    return None


def cache_in(home: Path) -> Path:
    """Return this node's folder for fetched files below `home`, which several nodes may share."""
    return home / "fetched" / (platform.node() or "node")


def _find_home() -> Path:
    """Return the folder `ROLLFLOW_HOME` if it is set, else `~/.rollflow` if writable, else a temporary folder."""
    if given := os.environ.get("ROLLFLOW_HOME"):
        return Path(given).expanduser().absolute()
    own = Path(os.path.expanduser("~/.rollflow"))  # `Path.expanduser` raises an error for a user without a home
    return own if own.is_absolute() and _create_writable(own) else _create_temporary()


def _create_writable(folder: Path) -> bool:
    """Create a folder if it is missing; return whether this process may write into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _create_temporary() -> Path:
    """Return a temporary folder, after checking that no other user created it or may write into it.

    The owner is checked, because another user could guess the name of the folder.
    """
    folder = Path(tempfile.gettempdir(), f"rollflow-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(
            f"ROLLFLOW_HOME is not set, and {folder} cannot be created ({error.strerror}); set ROLLFLOW_HOME "
            "to a folder that can be written"
        ) from None
    if found.st_uid != os.getuid() or found.st_mode & 0o022 or not stat.S_ISDIR(found.st_mode):
        raise ConfigError(
            f"ROLLFLOW_HOME is not set, and {folder} belongs to other users, too; set ROLLFLOW_HOME to a "
            "folder of this user"
        )
    return folder
