"""A private Ray cluster on loopback, and the folders its processes leave."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollflow.flows.reachability import speaks_http2
from rollflow.flows.services import Service, free_port, without


class RayHead(Service):
    """A private Ray cluster on loopback, with a token of its own; files in `home/ray/<process>-<number>`."""

    grace_seconds = 0.5  # nothing in the head needs an orderly end; what matters is stored elsewhere
    _count = 0

    def __init__(
        self,
        home: Path,
        *,
        cpus: int | None = None,
        gpus: int | None = None,
        object_store_bytes: int = 256 * 2**20,
        start_seconds: float = 90.0,
    ) -> None:
        RayHead._count += 1
        self.folder = home.absolute() / "ray" / f"{os.getpid()}-{RayHead._count}"
        super().__init__(self.folder / "head.log", start_seconds=start_seconds)
        self._cpus = cpus if cpus is not None else os.cpu_count() or 1
        self._gpus = gpus
        self._object_store_bytes = object_store_bytes
        self._temp = short_folder(self.folder)
        self._port = free_port()
        self.address = f"127.0.0.1:{self._port}"

    @property
    def what(self) -> str:
        return f"the private Ray cluster at {self.address}"

    @property
    def env(self) -> dict[str, str]:
        """What a process needs to attach to this cluster; set it before Ray is imported."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            # Despite its name, on Linux too: 0 keeps Ray from replacing 127.0.0.1 by the host's outside address.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def launch(self) -> None:
        """Start the head without waiting for it."""
        remove_dead_links(self.folder.parent)
        remove_dead_folders(self.folder.parent)
        self.folder.mkdir(parents=True, exist_ok=True)
        token = os.open(self.folder / "token", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(token, "w") as file:
            file.write(secrets.token_hex(32))
        if self._temp != self.folder:
            self._temp.symlink_to(self.folder)
        super().launch()

    def stop(self) -> None:
        """End every process of this cluster: raylet, workers, actors (detached too) and what those started."""
        super().stop()
        if self._temp.is_symlink():
            self._temp.unlink(missing_ok=True)

    def _command(self) -> Sequence[str]:
        size = ["--cpus", str(self._cpus), "--object-store-bytes", str(self._object_store_bytes)]
        if self._gpus is not None:
            size += ["--gpus", str(self._gpus)]
        place = ["--port", str(self._port), "--temp", str(self._temp), "--ready", str(self._ready_file)]
        return [sys.executable, "-m", "rollflow.flows.cluster", *place, *size]

    def _environment(self) -> Mapping[str, str]:
        own = without("RAY_ADDRESS", os.environ) | self.env
        # When an actor is killed, so is what it started (an engine's core process holds gigabytes).
        orphans = {"RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "1"}
        return own | orphans | {"RAY_enable_metrics_collection": "0"}

    @property
    def _ready_file(self) -> Path:
        return self.folder / "ready"

    def _ready(self) -> bool:
        return self._ready_file.exists() and speaks_http2("127.0.0.1", self._port, seconds=1.0)


# A unix socket's path holds 107 bytes, and Ray appends "/session_<date>_<time>_<pid>/sockets/plasma_store".
SOCKET_PATH_BYTES = 107
RAY_SUFFIX_BYTES = len("/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store")


def short_folder(folder: Path) -> Path:
    """`folder`, or where its name is too long for Ray's sockets the name of a link in the system's temp folder."""
    if len(os.fsencode(folder)) + RAY_SUFFIX_BYTES <= SOCKET_PATH_BYTES:
        return folder
    return Path(tempfile.gettempdir()) / f"rollflow-{secrets.token_hex(4)}"


def remove_dead_folders(parent: Path, keep: int = 2) -> None:
    """Remove the folders of clusters whose owner is gone, but the latest `keep` (their logs may be wanted)."""
    folders = [path for path in parent.glob("*-*") if path.is_dir()]
    dead = [path for path in folders if not _alive(path.name.partition("-")[0])]
    dead.sort(key=lambda path: path.stat().st_mtime)
    for path in dead[: max(0, len(dead) - keep)]:
        shutil.rmtree(path, ignore_errors=True)


def remove_dead_links(parent: Path) -> None:
    """Remove links that `short_folder` named for clusters in `parent` whose owner was killed, or that lead nowhere."""
    for link in Path(tempfile.gettempdir()).glob("rollflow-*"):
        if link.is_symlink():
            target = link.readlink()
            if not target.exists() or (target.parent == parent and not _alive(target.name.partition("-")[0])):
                with contextlib.suppress(OSError):  # another user's, or gone meanwhile
                    link.unlink()


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True
