"""Helper processes on loopback that live as long as a run: a Prefect server, MLflow, a Prefect runner (`ray_head` too).

Guarantees:
- `start()` returns when the service answers, or raises `Unreachable` saying what it waited for, how long, and
  where the service's log is; `stop()` may be called any number of times and returns within the service's grace
  plus `guard.REST_SECONDS + guard.KILL_SECONDS`, with every process of that service gone and no other touched.
- If this process dies, by SIGKILL too, the services end by themselves, and so does one whose guard is killed: each
  runs under a `guard` that holds the other end of a pipe. (A parent-death signal would not do: it fires when the
  *thread* that forked ends.)
- `restart()` ends what is left of a service and brings it back at its old address, with what it had stored.
- Nothing listens outside loopback, and nothing is reported home. But every user of a machine can reach its loopback,
  and a Prefect server starts any code it is told to. So it takes orders only with a secret string of its own. The
  processes that need the string get it by environment; otherwise it lies in a file that only this user can read.

Ctrl-C reaches only this process: each service has a session of its own.

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
    """A loopback port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_break(pipe: int, seconds: float) -> None:
    """Wait until nobody has the pipe's other end any more."""
    ends = select.poll()
    ends.register(pipe, 0)  # a break is always told
    ends.poll(seconds * 1000)


class Service(ABC):
    """One guarded child process. `launch()` then `wait()` is `start()`, so that several can start side by side."""

    grace_seconds = 3.0

    def __init__(self, log: Path, *, start_seconds: float) -> None:
        self.log = log
        self.start_seconds = start_seconds
        self.passed_on: tuple[int, ...] = ()  # open files that every process of it holds
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
                pass_fds=self.passed_on,
            )

    def wait(self) -> None:
        """Wait until the service answers.

        Raises:
            Unreachable: it ended, or did not answer in time; it was stopped.
        """
        deadline = time.monotonic() + self.start_seconds
        while not self._ready():
            if not self.running:
                code = self._process.returncode if self._process else "none"
                self.stop()
                raise Unreachable(f"{self.what} ended while starting (exit code {code}); see {self.log}")
            if time.monotonic() > deadline:
                self.stop()
                raise Unreachable(f"waited {self.start_seconds:.0f} s for {self.what} to answer; see {self.log}")
            time.sleep(POLL_SECONDS)

    def start(self) -> None:
        """Start the process and wait until it answers."""
        self.launch()
        self.wait()

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process above all of the service's; -1 where there is none."""
        return self._process.pid if self._process is not None else -1

    @property
    def answers(self) -> bool:
        """Whether the service answers now, as it must at its start. One that runs and does not answer is stuck."""
        return self._ready()

    @property
    def processes(self) -> list[int]:
        """The process ids of the service, without its guards."""
        return guard.descendants(self._process.pid)[1:] if self._process is not None and self.running else []

    def kill(self) -> None:
        """End every process of the service at once, in no order."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        limit = time.monotonic() + guard.KILL_SECONDS
        while self.running and time.monotonic() < limit:  # the guard forks its command, and ends when nothing is left
            for pid in self.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        self.stop()

    def relaunch(self) -> None:
        """End what is left of the service and start it again, without waiting for it."""
        self.stop()
        self._process = None
        self.launch()

    def restart(self) -> None:
        """`relaunch` and wait until it answers."""
        self.relaunch()
        self.wait()

    def stop(self) -> None:
        """End every process of the service."""
        if self._process is None:
            return
        longest = self.grace_seconds + guard.REST_SECONDS + guard.KILL_SECONDS + 2
        if self._process.stdin is not None and not self._process.stdin.closed:
            if not self.running:
                _await_break(
                    self._process.stdin.fileno(), longest
                )  # the guard was killed; the second one ends the rest
            self._process.stdin.close()  # the guard takes this for "end it"
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
    """Start services side by side; if one fails, all are stopped and its error is raised."""
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
    """Stop services, the last first."""
    for service in reversed(services):
        service.stop()


def without(prefix: str, environment: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if not key.startswith(prefix)}


def write_secret(file: Path, text: str) -> None:
    """Make a file that only this user can read."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as made:
        made.write(text)


def new_auth() -> str:
    """What a Prefect server asks for, and what its clients say."""
    return f"rollflow:{secrets.token_hex(32)}"


class PrefectServer(Service):
    """A private Prefect server on loopback, on a free port if none is given; SQLite in `home/prefect` or `database`.

    Its API answers only to those who know its secret string, and its pages ask for it. `auth_file` holds the string
    while the server lives. The database is migrated when it is first made, which takes most of the first start.
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
        """What a process needs to use this server (and to stay out of the person's own Prefect profile)."""
        address = {"PREFECT_API_URL": self.api_url, "PREFECT_API_AUTH_STRING": self._auth}
        return {"PREFECT_HOME": str(self.home), **address, **QUIET_PREFECT}

    def launch(self) -> None:
        """Start the server without waiting for it."""
        write_secret(self.auth_file, self._auth)
        super().launch()

    def stop(self) -> None:
        """End every process of the server."""
        super().stop()
        self.auth_file.unlink(missing_ok=True)

    def _command(self) -> Sequence[str]:
        start = ["server", "start", "--host", "127.0.0.1", "--port", str(self._port)]
        on_sqlite = not self._database or self._database.startswith("sqlite")
        module = "rollflow.flows.services.prefect_server" if on_sqlite else "prefect"
        return [sys.executable, "-m", module, *start]

    def _environment(self) -> Mapping[str, str]:
        # A setting meant for the person's own server (a database URL, an auth string) must not leak into this one.
        private = {"PREFECT_HOME": str(self.home), "PREFECT_UI_API_URL": self.api_url}
        private["PREFECT_SERVER_API_AUTH_STRING"] = self._auth
        if self._database:
            private["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = self._database
        return without("PREFECT_", os.environ) | QUIET_PREFECT | private | QUIET_SERVER

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
)  # no work pools; a run that is paused may stay so
QUIET_SERVER = {
    **{f"PREFECT_SERVER_SERVICES_{service}_ENABLED": "false" for service in UNUSED},
    # In memory, a server that is restarted would have forgotten who runs, and Prefect ends whom it has forgotten.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_SERVER_LEVEL": "WARNING",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
}


class MlflowServer(Service):
    """The MLflow UI over the run home's SQLite store, on loopback; on a free port if none is given."""

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
        # Its jobs judge traces, which a run has none of: they are eight processes.
        quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        return without("PREFECT_", without("MLFLOW_", os.environ)) | quiet

    def _ready(self) -> bool:
        return http_answers(f"{self.url}/health", seconds=1.0)


class Runner(Service):
    """A process that serves the deployments (`python -m rollflow.flows.deployments`) in a given environment.

    It counts as started when `ready` exists (a file that the module writes), or at once where none is given.
    Its flow runs get `grace_seconds` to end in order.
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
    "Runner",
    "Service",
    "free_port",
    "start_together",
    "stop_together",
    "write_secret",
]
