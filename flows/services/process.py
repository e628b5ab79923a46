"""Runs the services of a run as local processes: Prefect server, MLflow, Prefect runner and Ray (`ray_head`).

* `start()` returns when the service answers, or raises `Unreachable` with the service's name, the waiting time and the
  path of its log.
* `stop()` may be called several times. `stop()` returns within the service's `grace_seconds` plus
  `guard.REST_SECONDS + guard.KILL_SECONDS`. After `stop()` no process of the service is left.
* If this process dies, even by SIGKILL, its services end as well, because each service runs under a `guard` process
  that watches a pipe from this process. A service also ends if its `guard` process is killed.
* `restart()` ends a service's remaining processes and starts the service again, at the same address and with the same
  data.
* No service listens outside loopback or sends usage data. The private Prefect server requires a password, because every
  user of the machine can reach loopback, and a Prefect server starts any code on request. The password of the Prefect
  server is in the environment of the processes that need it, and in a file that only this user can read.
* Ctrl-C interrupts only this process, because each service runs in its own session.

Importing this module imports neither Prefect nor Ray nor MLflow.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rollflow.flows.services import guard
from rollflow.flows.services.reachability import http_answers
from rollflow.storage.errors import Unreachable

GUARD = Path(guard.__file__)
POLL_SECONDS = 0.05


def free_port() -> int:
    """Return a loopback port on which no process listens at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_break(pipe: int, seconds: float) -> None:
    """Wait for at most `seconds` until no process has the other end of a pipe open."""
    ends = select.poll()
    ends.register(pipe, 0)  # an event mask of 0 suffices, because `poll` always reports a broken pipe
    ends.poll(seconds * 1000)


class Service(ABC):
    """A service that runs as a child process under a `guard` process, which ends the service's whole process tree.
    `start()` is `launch()` followed by `wait()`; separate calls let several services start in parallel.
    """

    grace_seconds = 3.0

    def __init__(self, log: Path, *, start_seconds: float) -> None:
        self.log = log
        self.start_seconds = start_seconds
        self.passed_on: tuple[int, ...] = ()  # open file descriptors that every process of the service inherits
        self._process: subprocess.Popen[bytes] | None = None

    @property
    @abstractmethod
    def what(self) -> str:
        """The name and the address of the service, for messages."""

    @abstractmethod
    def _command(self) -> Sequence[str]: ...

    @abstractmethod
    def _environment(self) -> Mapping[str, str]: ...

    @abstractmethod
    def _ready(self) -> bool: ...

    def launch(self) -> None:
        """Start the service's process without waiting for its answer."""
        if self._process is not None:
            raise RuntimeError(f"{self.what} was already started")
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
                pass_fds=self.passed_on,
            )

    def wait(self) -> None:
        """Wait until the service answers.

        Raises:
            Unreachable: the service ended, or did not answer in time and was therefore stopped.
        """
        deadline = time.monotonic() + self.start_seconds
        while not self._ready():
            if not self.running:
                code = self._process.returncode if self._process else "none"
                self.stop()
                raise Unreachable(f"{self.what} ended while it was starting (exit code {code}); see {self.log}")
            if time.monotonic() > deadline:
                self.stop()
                raise Unreachable(
                    f"{self.what} did not answer within {self.start_seconds:.0f} s after its start; see {self.log}"
                )
            time.sleep(POLL_SECONDS)

    def start(self) -> None:
        """Start the service's process and wait until the service answers."""
        self.launch()
        self.wait()

    @property
    def running(self) -> bool:
        """True if the `guard` process that supervises the service is running."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the `guard` process that supervises the service; -1 if there is none."""
        return self._process.pid if self._process is not None else -1

    @property
    def answers(self) -> bool:
        """True if the service answers a request now; a service that runs without answering is stuck."""
        return self._ready()

    @property
    def processes(self) -> list[int]:
        """The process ids of the service, without its `guard` processes."""
        return guard.list_descendants(self._process.pid)[1:] if self._process is not None and self.running else []

    def kill(self) -> None:
        """Kill every process of the service immediately, in any order."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        limit = time.monotonic() + guard.KILL_SECONDS
        # The `guard` process ends when no process of the service is left; until then the service may start processes.
        while self.running and time.monotonic() < limit:
            for pid in self.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        self.stop()

    def relaunch(self) -> None:
        """End the service's remaining processes and restart the service, without waiting for its answer."""
        self.stop()
        self._process = None
        self.launch()

    def restart(self) -> None:
        """Restart the service and wait until it answers."""
        self.relaunch()
        self.wait()

    def stop(self) -> None:
        """End every process of the service."""
        if self._process is None:
            return
        longest = self.grace_seconds + guard.REST_SECONDS + guard.KILL_SECONDS + 2
        if self._process.stdin is not None and not self._process.stdin.closed:
            if not self.running:
                # If the outer `guard` process was killed, the inner one ends the remaining processes.
                _await_break(self._process.stdin.fileno(), longest)
            self._process.stdin.close()  # a closed pipe tells the `guard` process to end the service
        try:
            self._process.wait(longest)
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


def start_together(*services: Service, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Start several services in parallel; if a service fails, stop all of them and raise its error."""
    try:
        for service in services:
            service.launch()
        meanwhile()
        for service in services:
            service.wait()
    except BaseException:
        stop_together(*services)
        raise


def stop_together(*services: Service) -> None:
    """Stop services in the reverse of the given order."""
    for service in reversed(services):
        service.stop()


def drop_prefix(prefix: str, environment: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if not key.startswith(prefix)}


def write_secret(file: Path, text: str) -> None:
    """Write `text` to a file that only this user can read."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(text)


def new_auth() -> str:
    """Return a new random password for a Prefect server and its clients."""
    return f"rollflow:{secrets.token_hex(32)}"


class PrefectServer(Service):
    """A private Prefect server on loopback, which uses the database `database`, or SQLite in `home/prefect`.

    The Prefect server's API and web pages require a password, which is in the file `auth_file` while the server runs.
    """

    def __init__(
        self, home: Path, *, port: int | None = None, auth: str = "", database: str = "", start_seconds: float = 120.0
    ) -> None:
        self.home = home.absolute() / "prefect"
        super().__init__(self.home / "server.log", start_seconds=start_seconds)
        self._port = port or free_port()
        self._database = database
        self.ui_url = f"http://127.0.0.1:{self._port}"
        self.api_url = f"{self.ui_url}/api"
        self._auth = auth or new_auth()
        self.auth_file = self.home / f"auth-{self._port}"

    @property
    def what(self) -> str:
        return f"the private Prefect server at {self.ui_url}"

    @property
    def env(self) -> dict[str, str]:
        """The environment variables that make a process use this Prefect server in place of the user's own Prefect
        profile.
        """
        address = {"PREFECT_API_URL": self.api_url, "PREFECT_API_AUTH_STRING": self._auth}
        return {"PREFECT_HOME": str(self.home), **address, **QUIET_PREFECT}

    def launch(self) -> None:
        """Start the Prefect server without waiting for its answer."""
        write_secret(self.auth_file, self._auth)
        super().launch()

    def stop(self) -> None:
        """End every process of the Prefect server."""
        super().stop()
        self.auth_file.unlink(missing_ok=True)

    def _command(self) -> Sequence[str]:
        start = ["server", "start", "--host", "127.0.0.1", "--port", str(self._port)]
        on_sqlite = not self._database or self._database.startswith("sqlite")
        module = "rollflow.flows.services.prefect_server" if on_sqlite else "prefect"
        return [sys.executable, "-m", module, *start]

    def _environment(self) -> Mapping[str, str]:
        # Settings for the user's own Prefect server (such as a database URL) must not affect this private server.
        private = {"PREFECT_HOME": str(self.home), "PREFECT_UI_API_URL": self.api_url}
        private["PREFECT_SERVER_API_AUTH_STRING"] = self._auth
        if self._database:
            private["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = self._database
        return drop_prefix("PREFECT_", os.environ) | QUIET_PREFECT | private | QUIET_SERVER

    def _ready(self) -> bool:
        return http_answers(f"{self.api_url}/health", seconds=1.0)


QUIET_PREFECT = {
    "DO_NOT_TRACK": "1",
    "PREFECT_CLI_PROMPT": "false",
    "PREFECT_LOGGING_LEVEL": "WARNING",
}
UNUSED = (
    "FOREMAN",
    "REPOSSESSOR",
    "CLEANUP_RECONCILER",
    "PAUSE_EXPIRATIONS",
)  # Prefect services for work pools and for the timeout of paused runs, which rollflow does not use
QUIET_SERVER = {
    **{f"PREFECT_SERVER_SERVICES_{service}_ENABLED": "false" for service in UNUSED},
    # The leases of flow runs are stored in files, so that flow runs survive a restart of the Prefect server.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_SERVER_LEVEL": "WARNING",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
}


class MlflowServer(Service):
    """An MLflow server on loopback that shows the SQLite tracking store in the run home."""

    def __init__(self, home: Path, *, port: int | None = None, start_seconds: float = 120.0) -> None:
        self.folder = home.absolute() / "mlflow"
        super().__init__(self.folder / "server.log", start_seconds=start_seconds)
        self._port = port or free_port()
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
        # MLflow's job execution costs eight processes and serves trace judges, which rollflow does not use.
        quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        return drop_prefix("PREFECT_", drop_prefix("MLFLOW_", os.environ)) | quiet

    def _ready(self) -> bool:
        return http_answers(f"{self.url}/health", seconds=1.0)


class Runner(Service):
    """A Prefect runner: a process that serves the deployments (`python -m rollflow.flows.deployments`) in the given
    environment.

    The runner has started when it has written the file `ready`; if `ready` is None, it counts as started immediately.
    When the runner is stopped, its Prefect flow runs get `grace_seconds` to end.
    """

    def __init__(
        self,
        log: Path,
        env: Mapping[str, str],
        *,
        module: str = "rollflow.flows.deployments",
        arguments: Sequence[str] = (),
        ready: Path | None = None,
        grace_seconds: float = 15.0,
        start_seconds: float = 180.0,
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
        """Start the runner process without waiting for its file `ready`."""
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
    "Runner",
    "Service",
    "free_port",
    "start_together",
    "stop_together",
    "write_secret",
]
