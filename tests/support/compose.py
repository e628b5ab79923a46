"""Runs the services of `infra/compose.yaml` as processes. Each service has its own simulated machine, and is started by
its command in the file.

The file defines what a container would get: host names, environment, command, health check and start order. No
container engine is needed, so three things differ: Postgres is Debian's, moto replaces the S3 server, and this
repository with its Python environment replaces the image of rollflow.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import psutil
import yaml

from tests.support.machines import REPOSITORY, Machine, Machines
from tests.support.machines import why_not as why_no_machines
from tests.support.waiting import HANG_SECONDS, RUN_SECONDS, until

FILE = REPOSITORY / "infra" / "compose.yaml"
POSTGRES = Path("/usr/lib/postgresql")
DATA = "/home/postgres/data"


def why_not() -> str:
    """Return why the services cannot be started here; "" if they can."""
    if not [*POSTGRES.glob("*/bin/postgres")]:
        return "no Postgres server (Debian's package postgresql)"
    try:
        import psycopg2  # noqa: F401
    except ImportError:
        return "no psycopg2, by which MLflow reaches Postgres (make install)"
    return why_no_machines()


def secrets() -> dict[str, str]:
    """Return the secrets that `infra/secrets.sh` writes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "env"
        subprocess.run([REPOSITORY / "infra/secrets.sh", file], check=True)
        return dict(line.split("=", 1) for line in file.read_text().splitlines())


def interpolate(text: str, values: Mapping[str, str]) -> str:
    """Replace `${NAME}`, `${NAME:-default}` and `${NAME:?message}`, as Compose does."""

    def value(found: re.Match[str]) -> str:
        name, operator, rest = found.groups()
        if values.get(name):
            return values[name]
        assert operator != ":?", f"{name} is required: {rest}"
        return rest or ""

    return re.sub(r"\$\{(\w+)(:[-?])?([^}]*)\}", value, text)


def read(values: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the services of the file, ordered so that each comes after those it depends on."""
    services = yaml.safe_load(interpolate(FILE.read_text(), values))["services"]
    ordered: dict[str, dict[str, Any]] = {}
    while len(ordered) < len(services):
        ready = [
            name for name in services if name not in ordered and set(services[name].get("depends_on", ())) <= {*ordered}
        ]
        assert ready, "services depend on each other in a circle"
        ordered |= {name: services[name] for name in ready}
    return ordered


class Compose:
    """Runs the services for the length of a block."""

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        self.values = dict(values or secrets())
        self.services = read(self.values)
        self.machines: dict[str, Machine] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._network = self._stack.enter_context(Machines())
        for name in self.services:
            self.machines[name] = self._network.machine(name)
        hosts = {name: machine.address for name, machine in self.machines.items()}
        for machine in self.machines.values():
            machine.know(hosts)
            machine.path("/home/rollflow/home").mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def up(self) -> Self:
        """Start each service once the conditions on its dependencies hold."""
        for name, service in self.services.items():
            for other, wanted in service.get("depends_on", {}).items():
                self.wait(other, wanted["condition"])
            self.start(name)
        for name, service in self.services.items():
            if "healthcheck" in service:
                self.wait(name, "service_healthy")
        return self

    def start(self, name: str) -> None:
        """Start a service with its command and environment."""
        if name == "postgres":
            self._start_postgres()
        elif name == "s3":
            self.processes[name] = self._run(name, [sys.executable, "-m", "tests.support.compose", "s3"])
        else:
            self.processes[name] = self._run(name, shlex.split(self.services[name]["command"]))

    def kill(self, *names: str) -> None:
        """Kill all processes on the machines of these services with SIGKILL."""
        for name in names:

            def gone(machine: Machine = self.machines[name]) -> bool:
                found = machine.processes()
                for process in found:
                    with contextlib.suppress(psutil.Error):
                        process.kill()
                return not found

            until(gone)
            self.processes[name].wait()

    def lose_databases(self) -> None:
        """Remove the disk of Postgres, which must not be running."""
        shutil.rmtree(self.machines["postgres"].path(DATA))

    def wait(self, name: str, condition: str) -> None:
        """Wait until a service has started, is healthy, or has ended well."""

        def reached() -> bool:
            code = self.processes[name].poll()
            if condition == "service_completed_successfully":
                assert code in (None, 0), f"{name} failed (exit code {code}):\n{self.output(name)}"
                return code == 0
            if code is not None:
                assert "restart" in self.services[name], f"{name} ended (exit code {code}):\n{self.output(name)}"
                self.start(name)  # `ray start` waits only 30 s, too short for a slow machine
            if condition == "service_started":
                return True
            return self._is_healthy(name)

        try:
            until(reached, RUN_SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{name}: {condition}: {error}\n{self.output(name)}") from None

    def _is_healthy(self, name: str) -> bool:
        """Run a service's health check. If the check fails, wait for the interval in the file."""
        check = self.services[name]["healthcheck"]
        healthy = self.execute(name, ["sh", "-c", check["test"]], seconds=HANG_SECONDS).returncode == 0
        if not healthy:
            time.sleep(float(check["interval"].removesuffix("s")))
        return healthy

    def execute(
        self, name: str, command: list[str], *, seconds: float, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """`docker compose exec`: run a command beside a service, to its end."""
        inside, own = self._inside(name, command), self._environment(name) | environment
        return subprocess.run(inside, env=own, capture_output=True, text=True, timeout=seconds)

    def begin(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        """`docker compose exec --detach`: start a command beside a service; its output goes to the service's."""
        return self._run(name, command)

    def output(self, name: str) -> str:
        """Return the end of the output of a service and the commands beside it."""
        return self.machines[name].output(100)

    def memory(self, name: str) -> int:
        """Return the memory of a service in bytes; memory shared by processes counts once."""
        total = 0
        for process in self.machines[name].processes():
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total

    def _run(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        log = self.machines[name].home / "output.log"
        shell = ["sh", "-c", f'exec "$@" >> {log} 2>&1', "sh", *command]
        return subprocess.Popen(self._inside(name, shell), env=self._environment(name), stdin=subprocess.DEVNULL)

    def _inside(self, name: str, command: list[str]) -> list[str]:
        machine = self.machines[name]
        prefix = ["nsenter", "--target", str(machine.pid), "--net", "--mount", "--pid", f"--wdns={REPOSITORY}", "--"]
        return [*prefix, *command]

    def _environment(self, name: str) -> dict[str, str]:
        """Return the variables set by the service's section and its image."""
        image = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), *self._postgres_path(), os.environ["PATH"]]),
            "HOME": str(self.machines[name].home),
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY / ".dev"), str(REPOSITORY)]),
            "OMP_NUM_THREADS": "1",
        }
        return image | {key: str(value) for key, value in self.services[name].get("environment", {}).items()}

    def _postgres_path(self) -> list[str]:
        return [str(path) for path in sorted(POSTGRES.glob("*/bin"))[-1:]]

    def _start_postgres(self) -> None:
        """Start Postgres as the entry point of its image does: create a database cluster with the given password, run
        the SQL file, and serve.
        """
        machine, password = self.machines["postgres"], self.services["postgres"]["environment"]["POSTGRES_PASSWORD"]
        home = machine.path("/home/postgres")
        if not (home / "data").exists():
            home.mkdir(exist_ok=True)
            (home / "password").write_text(password)
            shutil.chown(home, "postgres", "postgres")
            made = [
                "initdb",
                "-D",
                DATA,
                "--auth=scram-sha-256",
                "--pwfile=/home/postgres/password",
                "--username=postgres",
            ]
            self._as_postgres([*made])
            with (home / "data" / "pg_hba.conf").open("a") as file:
                file.write("host all all all scram-sha-256\n")
            first = FILE.with_name("databases.sql").read_text()
            for statement in first.split(";"):
                if "CREATE" in statement:
                    self._as_postgres(["postgres", "--single", "-D", DATA, "postgres"], statement.split("\n")[-1])
        serve = ["postgres", "-D", DATA, "-c", "listen_addresses=*", "-c", "unix_socket_directories=/tmp"]
        self.processes["postgres"] = self._run("postgres", ["setpriv", *AS_POSTGRES, *serve])

    def _as_postgres(self, command: list[str], given: str = "") -> None:
        inside = self._inside("postgres", ["setpriv", *AS_POSTGRES, *command])
        environment = self._environment("postgres")
        done = subprocess.run(
            inside, env=environment, input=given, capture_output=True, text=True, timeout=HANG_SECONDS
        )
        assert done.returncode == 0, done.stdout + done.stderr


AS_POSTGRES = ["--reuid=postgres", "--regid=postgres", "--clear-groups"]


def serve_s3() -> None:
    """Serve S3 at the port of `AWS_ENDPOINT_URL_S3`, until this process is killed."""
    import threading

    from tests.support.s3_server import s3_server

    with s3_server("unused", "0.0.0.0", port=9000):
        threading.Event().wait()


if __name__ == "__main__":
    serve_s3()
