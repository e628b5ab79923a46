"""Runs the Prefect server of a run home (rollflow's folder of local files); all commands share this server, because
only one server may open the SQLite file.

    commands in the home          holder                  Prefect server
    a shared lock on `users`      the lock on `holder`    under the holder's guard
         |                             |
         +-- the first starts it ----> +-- ends the server once nobody holds `users`

Guarantees: the server keeps its address and its secret string between starts (`read_addresses.json`, `auth`); the
server gets another port only if its old port is taken. A command that ends never takes the server from another command.
The lock on `holder` is free only when the last process of a server is gone. While a server ends, only its holder has
the lock on `users`, and new commands wait.

    python -m rollflow.flows.services.home_server HOME LOCK    the holder; LOCK is the open file that it inherits
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rollflow.flows.services import guard
from rollflow.flows.services.locks import PROBE_SECONDS, await_free, is_held, one_at_a_time, take, take_within
from rollflow.flows.services.process import PrefectServer, free_port, new_auth, write_secret
from rollflow.storage.errors import Unreachable

POLL_SECONDS = 0.5
END_SECONDS = guard.REST_SECONDS + guard.KILL_SECONDS + 10


def read_addresses(home: Path) -> dict[str, Any]:
    """Return the ports that the services of this run home last had (`prefect`, `mlflow`, `ray`), and the address
    `database` if one was given.
    """
    file = home / "addresses.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def store_addresses(home: Path, **what: Any) -> None:
    """Store the ports and the database's address in the run home, for the next start of the services."""
    home.mkdir(parents=True, exist_ok=True)
    new = home / f"addresses-{os.getpid()}.new"
    new.write_text(json.dumps(read_addresses(home) | what))
    new.replace(home / "addresses.json")


def stable_port(home: Path, name: str) -> int:
    """Return the port that the service `name` last had in this run home if the port is still free; otherwise store and
    return a new port.
    """
    port = read_addresses(home).get(name)
    if port is None or not is_free(port):
        port = free_port()
        store_addresses(home, **{name: port})
    return int(port)


def is_free(port: int) -> bool:
    """Return whether no process listens on this loopback port."""
    with socket.socket() as probe:
        # With the option SO_REUSEADDR, which servers also set, the port of a server that has just ended counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


class HomeServer(PrefectServer):
    """The Prefect server of a run home, shared by several commands; the server ends after the last command that uses
    it.
    """

    def __init__(self, home: Path, *, start_seconds: float = 120.0) -> None:
        self._place = home.absolute()
        folder = self._place / "prefect"
        self._users, self._holder, self._pid = folder / "users", folder / "holder", folder / "holder.pid"
        self._using = take_within(self._users, END_SECONDS, shared=True)
        if self._using is None:
            raise Unreachable(
                f"the previous Prefect server of {home} still runs after {END_SECONDS:.0f} s; try again when it "
                "has ended"
            )
        # id of the process that runs the Prefect server, as last seen or started by this command; -1 if none
        self._known = -1
        with one_at_a_time(folder / "starting"):
            if not is_held(self._holder):
                stable_port(self._place, "prefect")
            auth = _load_secret(folder / "auth")
        known = read_addresses(self._place)
        super().__init__(
            home, port=known["prefect"], auth=auth, database=known.get("database", ""), start_seconds=start_seconds
        )
        self.auth_file = folder / "auth"

    def launch(self) -> None:
        """Start the Prefect server if it is not running, without waiting for its answer."""
        with one_at_a_time(self.home / "starting"):
            held = take_within(self._holder, PROBE_SECONDS)
            if held is None:
                return
            try:
                command = [sys.executable, "-m", __name__, str(self._place), str(held)]
                with self.log.open("ab") as log:
                    self._started = subprocess.Popen(
                        command,
                        env=dict(self._environment()) | {"ROLLFLOW_HOME": str(self._place)},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                        pass_fds=(held,),
                    )
                self._pid.write_text(str(self._started.pid))
            finally:
                os.close(held)

    @property
    def running(self) -> bool:
        """True if the Prefect server is running, even if another command started it."""
        return is_held(self._holder)

    @property
    def pid(self) -> int:
        """The id of the process that runs the Prefect server and holds its lock; -1 if there is none."""
        return int(self._pid.read_text()) if self.running and self._pid.exists() else -1

    @property
    def processes(self) -> list[int]:
        """The process ids of the Prefect server, without the processes that supervise it."""
        return guard.list_descendants(pid)[2:] if (pid := self.pid) > 0 else []

    def relaunch(self) -> None:
        """End the remaining processes of the Prefect server and restart it, without waiting for its answer.

        If another command has meanwhile started a Prefect server, that server keeps running.
        """
        if self.pid == self._known:
            self._end()
        self.launch()
        self._known = self.pid

    def _ready(self) -> bool:
        if found := super()._ready():
            self._known = self.pid
        return found

    def kill(self) -> None:
        """Kill every process of the Prefect server immediately."""
        pid = self.pid
        for one in [pid, *guard.list_descendants(pid)] if pid > 0 else []:  # a signal to -1 would go to every process
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        await_free(self._holder, END_SECONDS)

    def stop(self) -> None:
        """Stop using the Prefect server; the server ends if no other command uses it."""
        if self._using is not None:
            os.close(self._using)
            self._using = None
            if (alone := take(self._users)) is not None:
                os.close(alone)
            # If the lock is not free, other commands use the Prefect server, or the server is already ending.
            if alone is not None or is_held(self._users):
                await_free(self._holder, END_SECONDS)

    def _end(self) -> None:
        """End the process that runs the Prefect server, and with it the server."""
        if (pid := self.pid) > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            if not await_free(self._holder, END_SECONDS):
                self.kill()


def _load_secret(file: Path) -> str:
    """Return the password that the Prefect server and its clients share; write a new password if the file is missing or
    empty.
    """
    if not file.exists() or not file.read_text():
        write_secret(file, new_auth())
    return file.read_text()


def hold(home: Path, lock: int) -> None:
    """Run the Prefect server until no command uses it, or until the server's process ends."""
    known, folder = read_addresses(home), home / "prefect"
    server = PrefectServer(
        home, port=known["prefect"], auth=_load_secret(folder / "auth"), database=known.get("database", "")
    )
    server.passed_on = (lock,)
    with server:
        # When no command uses the Prefect server, this process locks `users` until the server ends.
        while server.running and take(folder / "users") is None:
            time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    hold(Path(sys.argv[1]), int(sys.argv[2]))
