"""Helper processes on loopback that live as long as a run: a Prefect server, a Ray head, a Prefect runner.

Guarantees:
- `start()` returns when the service answers, or raises `Unreachable` saying what it waited for, how long, and
  where the service's log is; `stop()` may be called any number of times and returns within the service's grace
  plus `guard.REST_SECONDS + guard.KILL_SECONDS`, with every process of that service gone and no other touched.
- If this process dies, by SIGKILL too, the services end by themselves: each runs under a `guard` that holds the
  other end of a pipe. (A parent-death signal would not do: it fires when the *thread* that forked ends.)
- Nothing listens outside loopback and nothing is reported home.

Ctrl-C reaches only this process: each service has a session of its own.

Importing this module imports neither Prefect nor Ray nor MLflow.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rollflow.flows import guard
from rollflow.flows.reachability import check_mlflow, check_prefect, check_ray, http_answers, redact, speaks_http2
from rollflow.storage.errors import Unreachable

GUARD = Path(guard.__file__)
POLL_SECONDS = 0.05


def free_port() -> int:
    """A loopback port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Service(ABC):
    """One guarded child process. `launch()` then `wait()` is `start()`, so that several can start side by side."""

    grace_seconds = 3.0

    def __init__(self, log: Path, *, start_seconds: float) -> None:
        self.log = log
        self._start_seconds = start_seconds
        self._process: subprocess.Popen[bytes] | None = None

    @property
    @abstractmethod
    def what(self) -> str:
        """The service in words, with its address."""

    @abstractmethod
    def _command(self) -> Sequence[str]: ...

    @abstractmethod
    def _environment(self) -> Mapping[str, str]: ...

    @abstractmethod
    def _ready(self) -> bool: ...

    def launch(self) -> None:
        """Start the process without waiting for it."""
        if self._process is not None:
            raise RuntimeError(f"{self.what} was started already")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-I", "-S", str(GUARD), str(self.grace_seconds), *self._command()]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=dict(self._environment()),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until the service answers.

        Raises:
            Unreachable: it ended, or did not answer in time; it was stopped.
        """
        deadline = time.monotonic() + self._start_seconds
        while not self._ready():
            if not self.running:
                code = self._process.returncode if self._process else "none"
                self.stop()
                raise Unreachable(f"{self.what} ended while starting (exit code {code}); see {self.log}")
            if time.monotonic() > deadline:
                self.stop()
                raise Unreachable(f"waited {self._start_seconds:.0f} s for {self.what} to answer; see {self.log}")
            time.sleep(POLL_SECONDS)

    def start(self) -> None:
        """Start the process and wait until it answers."""
        self.launch()
        self.wait()

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End every process of the service."""
        if self._process is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()  # the guard takes this for "end it"
        try:
            self._process.wait(self.grace_seconds + guard.REST_SECONDS + guard.KILL_SECONDS + 2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start_together(*services: Service) -> None:
    """Start services side by side; if one fails, all are stopped and its error is raised."""
    try:
        for service in services:
            service.launch()
        for service in services:
            service.wait()
    except BaseException:
        stop_together(*services)
        raise


def stop_together(*services: Service) -> None:
    """Stop services, the last first."""
    for service in reversed(services):
        service.stop()


def _without(prefix: str, environment: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if not key.startswith(prefix)}


class PrefectServer(Service):
    """A private Prefect server on a free loopback port, its SQLite database in `home/prefect`.

    The database is migrated when it is first made, which takes most of the first start.
    """

    def __init__(self, home: Path, *, start_seconds: float = 120.0) -> None:
        self.home = home.absolute() / "prefect"
        super().__init__(self.home / "server.log", start_seconds=start_seconds)
        self._port = free_port()
        self.ui_url = f"http://127.0.0.1:{self._port}"
        self.api_url = f"{self.ui_url}/api"

    @property
    def what(self) -> str:
        return f"the private Prefect server at {self.ui_url}"

    @property
    def env(self) -> dict[str, str]:
        """What a process needs to use this server (and to stay out of the person's own Prefect profile)."""
        return {"PREFECT_HOME": str(self.home), "PREFECT_API_URL": self.api_url, **QUIET_PREFECT}

    def _command(self) -> Sequence[str]:
        start = ["server", "start", "--host", "127.0.0.1", "--port", str(self._port)]
        return [sys.executable, "-m", "prefect", *start]

    def _environment(self) -> Mapping[str, str]:
        # A setting meant for the person's own server (a database URL, an auth string) must not leak into this one.
        private = {"PREFECT_HOME": str(self.home), "PREFECT_UI_API_URL": self.api_url}
        return _without("PREFECT_", os.environ) | QUIET_PREFECT | private | QUIET_SERVER

    def _ready(self) -> bool:
        return http_answers(f"{self.api_url}/health", seconds=1.0)


QUIET_PREFECT = {
    "DO_NOT_TRACK": "1",
    "PREFECT_CLI_PROMPT": "false",
    "PREFECT_LOGGING_LEVEL": "WARNING",
}
QUIET_SERVER = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_SERVER_LEVEL": "WARNING",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
}


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
        own = _without("RAY_ADDRESS", os.environ) | self.env
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


class MlflowServer(Service):
    """The MLflow UI over the run home's SQLite store, on a free loopback port."""

    def __init__(self, home: Path, *, start_seconds: float = 120.0) -> None:
        self.folder = home.absolute() / "mlflow"
        super().__init__(self.folder / "server.log", start_seconds=start_seconds)
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"

    @property
    def what(self) -> str:
        return f"MLflow at {self.url}"

    def _command(self) -> Sequence[str]:
        store = ["--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        artifacts = ["--artifacts-destination", str(self.folder / "artifacts")]
        place = ["--host", "127.0.0.1", "--port", str(self._port), "--workers", "1"]
        return [sys.executable, "-m", "mlflow", "server", *store, *artifacts, *place]

    def _environment(self) -> Mapping[str, str]:
        return _without("MLFLOW_", os.environ)

    def _ready(self) -> bool:
        return http_answers(f"{self.url}/health", seconds=1.0)


class Runner(Service):
    """A process that serves the deployments (`python -m rollflow.flows.serve`) in a given environment.

    It counts as started when `ready` exists (a file that the module writes), or at once where none is given.
    Its flow runs get `grace_seconds` to end in order.
    """

    def __init__(
        self,
        log: Path,
        env: Mapping[str, str],
        *,
        module: str = "rollflow.flows.serve",
        arguments: Sequence[str] = (),
        ready: Path | None = None,
        grace_seconds: float = 15.0,
        start_seconds: float = 60.0,
    ) -> None:
        super().__init__(log.absolute(), start_seconds=start_seconds)
        self.grace_seconds = grace_seconds
        self._env = dict(env)
        self._module = module
        self._arguments = tuple(arguments)
        self._ready_file = ready

    @property
    def what(self) -> str:
        return f"the Prefect runner ({self._module})"

    def launch(self) -> None:
        """Start the runner without waiting for it."""
        if self._ready_file is not None:
            self._ready_file.unlink(missing_ok=True)
        super().launch()

    def _command(self) -> Sequence[str]:
        return [sys.executable, "-m", self._module, *self._arguments]

    def _environment(self) -> Mapping[str, str]:
        return dict(os.environ) | self._env

    def _ready(self) -> bool:
        return self.running and (self._ready_file is None or self._ready_file.exists())


__all__ = [
    "MlflowServer",
    "PrefectServer",
    "RayHead",
    "Runner",
    "Service",
    "check_mlflow",
    "check_prefect",
    "check_ray",
    "free_port",
    "redact",
    "start_together",
    "stop_together",
]
