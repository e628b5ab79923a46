"""Starts the head and further nodes of private Ray clusters on loopback, and manages the folders of their processes.

The Ray head detects a dead node within about three seconds; later calls to actors on the dead node fail.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import psutil

from rollflow.flows.ray_cluster.lost_workers import FOLDER
from rollflow.flows.services.process import Service, drop_prefix, free_port, write_secret
from rollflow.flows.services.reachability import speaks_http2
from rollflow.flows.services.variables import SOCKET_PATH_BYTES, short_folders
from rollflow.storage.errors import ConfigError
from rollflow.tasks.actors.early_imports import WANTED, Kind

NOTICE = {  # health check settings of the Ray head: a node counts as dead after four failed checks in a row
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "4",
    # a long timeout, because a node that answers slowly may only be short of CPUs
    "RAY_health_check_timeout_ms": "5000",
}
IMPORTING = {
    # seconds within which a Ray worker must register, including its imports; Ray's default is 60
    "RAY_worker_register_timeout_seconds": "600",
    # number of plain Ray workers, without imported modules, that Ray starts in advance
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
}


RESERVE = 2  # number of Ray workers that may start in place of workers that died before they registered


class RayHead(Service):
    """The head of a private Ray cluster on loopback, which requires its own token."""

    grace_seconds = 0.5  # seconds after which an ending Ray head is killed; it stores no important data
    _count = 0

    def __init__(
        self,
        home: Path,
        *,
        cpus: int | None = None,
        gpus: int | None = None,
        object_store_bytes: int = 256 * 2**20,
        port: int | None = None,
        spares: Sequence[Kind] = (),
        keep_spares: bool = False,
        start_seconds: float = 90.0,
    ) -> None:
        """Prepare the Ray cluster without starting it. `spares` lists the kinds of actor for which spare Ray workers
        import the modules in advance.
        """
        RayHead._count += 1
        self.folder = home.absolute() / "ray" / f"{os.getpid()}-{RayHead._count}"
        super().__init__(self.folder / "head.log", start_seconds=start_seconds)
        self._cpus = cpus if cpus is not None else os.cpu_count() or 1
        self._gpus = gpus
        self._object_store_bytes = object_store_bytes
        self.temp = short_folder(self.folder)
        self._port = port or free_port()
        self.address = f"127.0.0.1:{self._port}"
        self._spares, self._keep_spares = tuple(spares), keep_spares

    @property
    def what(self) -> str:
        return f"the private Ray cluster at {self.address}"

    @property
    def env(self) -> dict[str, str]:
        """The environment variables that a process needs to connect to this Ray cluster, to be set before Ray is
        imported.
        """
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            # On Linux, too, the value 0 keeps Ray from replacing 127.0.0.1 by the outside address.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            FOLDER: str(self._lost),
        }

    @property
    def node_env(self) -> dict[str, str]:
        """The environment variables of a Ray node's processes."""
        # Ray also kills an actor's child processes with the actor (the core process of an engine holds gigabytes).
        orphans = {"RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "1"}
        # Ray actors get no `PREFECT_` variables, because they send no requests to the Prefect server.
        inherited = drop_prefix("PREFECT_", drop_prefix("RAY_ADDRESS", os.environ))
        own = {"RAY_enable_metrics_collection": "0", WANTED: str(self._wanted), **IMPORTING}
        # Besides one Ray worker per CPU, the spare workers and replacements may start at the same time.
        own["RAY_worker_maximum_startup_concurrency"] = str(self._cpus + len(self._spares) + RESERVE)
        return inherited | self.env | orphans | NOTICE | own

    def launch(self) -> None:
        """Start the Ray head without waiting until it answers."""
        remove_dead_links(self.folder.parent)
        remove_dead_folders(self.folder.parent)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._ready_file.unlink(missing_ok=True)
        # A restarted Ray head keeps its token, because clients have already read the token.
        if not (self.folder / "token").exists():
            write_secret(self.folder / "token", secrets.token_hex(32))
        if self.temp != self.folder:
            self.temp.symlink_to(self.folder)
        super().launch()

    def stop(self) -> None:
        """End every process of this Ray cluster: raylet, workers, actors (including detached actors) and their
        children.
        """
        super().stop()
        if self.temp.is_symlink():
            self.temp.unlink(missing_ok=True)

    def _command(self) -> Sequence[str]:
        size = ["--cpus", str(self._cpus), "--object-store-bytes", str(self._object_store_bytes)]
        if self._gpus is not None:
            size += ["--gpus", str(self._gpus)]
        if self._spares:
            size += ["--spares", str(self._wanted), "--kinds", ",".join(self._spares)]
            size += ["--keep-spares"] if self._keep_spares else []
        place = ["--port", str(self._port), "--temp", str(self.temp), "--ready", str(self._ready_file)]
        place += ["--lost", str(self._lost)]
        return [sys.executable, "-m", "rollflow.flows.ray_cluster.ray_process", *place, *size]

    def _environment(self) -> Mapping[str, str]:
        return self.node_env

    @property
    def _ready_file(self) -> Path:
        return self.folder / "ready"

    @property
    def _lost(self) -> Path:
        return self.folder / "lost"

    @property
    def _wanted(self) -> Path:
        return self.folder / "spares"

    def _ready(self) -> bool:
        return self._ready_file.exists() and speaks_http2("127.0.0.1", self._port, seconds=1.0)


class RayNode(Service):
    """An additional node of a private Ray cluster on the same machine: a raylet with its own object store and
    resources.

    The node simulates a second machine: its actors die when the node ends or one of its `processes` is killed.
    """

    grace_seconds = 0.5
    _count = 0

    def __init__(
        self,
        head: RayHead,
        *,
        cpus: int = 1,
        resources: Mapping[str, float] | None = None,
        labels: Mapping[str, str] | None = None,
        object_store_bytes: int = 128 * 2**20,
        start_seconds: float = 90.0,
    ) -> None:
        RayNode._count += 1
        self.head = head
        self._name = f"node-{RayNode._count}"
        super().__init__(head.folder / f"{self._name}.log", start_seconds=start_seconds)
        self._ready_file = head.folder / f"{self._name}-ready"
        self._cpus = cpus
        self._resources, self._labels = json.dumps(dict(resources or {})), json.dumps(dict(labels or {}))
        self._object_store_bytes = object_store_bytes

    @property
    def what(self) -> str:
        return f"{self._name} of {self.head.what}"

    def launch(self) -> None:
        """Start the Ray node without waiting until it answers."""
        self._ready_file.unlink(missing_ok=True)
        super().launch()

    def _command(self) -> Sequence[str]:
        size = ["--cpus", str(self._cpus), "--object-store-bytes", str(self._object_store_bytes)]
        place = ["--join", self.head.address, "--temp", str(self.head.temp), "--ready", str(self._ready_file)]
        place += ["--lost", str(self.head.folder / "lost")]
        return [
            sys.executable,
            "-m",
            "rollflow.flows.ray_cluster.ray_process",
            *place,
            *size,
            "--resources",
            self._resources,
            "--labels",
            self._labels,
        ]

    def _environment(self) -> Mapping[str, str]:
        return self.head.node_env

    def _ready(self) -> bool:
        return self._ready_file.exists()


# Ray's longest socket path is its folder followed by "/session_<date>_<time>_<pid>/sockets/plasma_store".
RAY_SUFFIX_BYTES = len("/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store")


def short_folder(folder: Path) -> Path:
    """Return `folder`; if its path is too long for Ray's sockets, return the path of a short link to it.

    Raises:
        ConfigError: no folder for temporary files has a short enough path.
    """
    if _fits(folder):
        return folder
    name = f"rollflow-{secrets.token_hex(4)}"
    link = next((short / name for short in short_folders() if _fits(short / name)), None)
    if link is None:
        raise ConfigError(
            f"ROLLFLOW_HOME: the paths of sockets in {str(folder)!r} would be too long, and no folder for "
            "temporary files has a short enough path; set ROLLFLOW_HOME to a folder with a shorter path"
        )
    return link


def _fits(folder: Path) -> bool:
    return len(os.fsencode(folder)) + RAY_SUFFIX_BYTES <= SOCKET_PATH_BYTES


def remove_dead_folders(parent: Path, keep: int = 2) -> None:
    """Delete the folders of Ray clusters whose owner process is gone, but keep the newest `keep` folders for their
    logs.
    """
    folders = [path for path in parent.glob("*-*") if path.is_dir()]
    dead = [path for path in folders if not _alive(path.name.partition("-")[0])]
    dead.sort(key=lambda path: path.stat().st_mtime)
    for path in dead[: max(0, len(dead) - keep)]:
        shutil.rmtree(path, ignore_errors=True)


def remove_dead_links(parent: Path) -> None:
    """Delete links made by `short_folder` if the target is gone or the owner process of the Ray cluster was killed."""
    for link in chain.from_iterable(folder.glob("rollflow-*") for folder in short_folders()):
        with contextlib.suppress(OSError):  # the link belongs to another user, or another process has removed it
            target = link.readlink()
            if not target.exists() or (target.parent == parent and not _alive(target.name.partition("-")[0])):
                link.unlink()


def _alive(pid: str) -> bool:
    return pid.isdecimal() and psutil.pid_exists(int(pid))
