"""Opens object stores; the module `base` defines what every object store guarantees."""

from __future__ import annotations

from pathlib import Path

from rollflow.storage.errors import ConfigError
from rollflow.storage.objects.base import Data, ObjectStat, ObjectStore


def open_store(uri: str, patience: float | None = None) -> ObjectStore:
    """Open the store that `uri` names: `s3://bucket/prefix`, `memory://name`, or a local folder.

    The argument `patience` is the time in seconds for which a request to an unresponsive store is retried; the default
    is a few minutes.

    A backend's module is imported only when the backend is used, so a local run never loads s3fs.
    """
    scheme, sep, rest = uri.partition("://")
    if not sep or scheme == "file":
        from rollflow.storage.objects.local import LocalStore

        try:
            return LocalStore(Path(rest if sep else uri).expanduser().absolute())
        except RuntimeError as error:
            raise ConfigError(
                f"store.uri = {uri!r} names the home folder of an unknown user ({error}); name a folder"
            ) from None
    root = rest.strip("/")
    if root and any(part in ("", ".", "..") for part in root.split("/")):
        raise ConfigError(f"store.uri = {uri!r} has an empty, '.' or '..' part; write the path without that part")
    if scheme == "s3":
        from rollflow.storage.objects.s3 import S3Store

        return S3Store(root, patience)
    if scheme == "memory":
        from rollflow.storage.objects.memory import MemoryStore

        return MemoryStore(root)
    raise ConfigError(
        f"store.uri = {uri!r} is not a folder, and not a known kind of store; use a folder, "
        "s3://bucket/prefix or memory://name"
    )


__all__ = ["Data", "ObjectStat", "ObjectStore", "open_store"]
