"""The Prefect server of a run home: one for all commands in it, so that no two open one SQLite file.

    commands in the home          holder                  Prefect server
    a shared lock on `users`      the lock on `holder`    under the holder's guard
         |                             |
         +-- the first starts it ----> +-- ends the server once nobody holds `users` any more

Guarantees: it has the address and the secret string that it had last time (`addresses.json`, `auth`), another port only
where somebody else took that one. A command that ends, however, takes the server from no other one. `holder` is free
only when the last process of a server is gone; while it ends, its holder alone has `users`, and newcomers wait.

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


def addresses(home: Path) -> dict[str, Any]:
    """The ports that this home had last: `prefect`, `mlflow`, `ray`; and its `database`, where one was given."""
    file = home / "addresses.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def remember(home: Path, **what: Any) -> None:
    """Keep them for next time."""
    home.mkdir(parents=True, exist_ok=True)
    new = home / f"addresses-{os.getpid()}.new"
    new.write_text(json.dumps(addresses(home) | what))
    new.replace(home / "addresses.json")


def stable_port(home: Path, name: str) -> int:
    """The port that `name` had last in this home, if nobody else has taken it; else a free one, which is kept."""
    port = addresses(home).get(name)
    if port is None or not is_free(port):
        port = free_port()
        remember(home, **{name: port})
    return int(port)


def is_free(port: int) -> bool:
    """Whether nobody listens on this port of the loopback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: one that has just ended is free
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


class HomeServer(PrefectServer):
    """The server as a command of the home uses it, from its making to `stop`."""

    def __init__(self, home: Path, *, start_seconds: float = 120.0) -> None:
        self._place = home.absolute()
        folder = self._place / "prefect"
        self._users, self._holder, self._pid = folder / "users", folder / "holder", folder / "holder.pid"
        self._using = take_within(self._users, END_SECONDS, shared=True)
        if self._using is None:
            raise Unreachable(f"waited {END_SECONDS:.0f} s for the last Prefect server of {home} to end")
        self._known = -1  # the holder that last answered, or was started, as this command saw it
        with one_at_a_time(folder / "starting"):
            if not is_held(self._holder):
                stable_port(self._place, "prefect")
            auth = _secret(folder / "auth")
        known = addresses(self._place)
        super().__init__(
            home, port=known["prefect"], auth=auth, database=known.get("database", ""), start_seconds=start_seconds
        )
        self.auth_file = folder / "auth"

    def launch(self) -> None:
        """Start the server, unless it is there, without waiting for it."""
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
        """Whether a server is held, by whoever started it."""
        return is_held(self._holder)

    @property
    def pid(self) -> int:
        """Its holder; -1 where there is none, which may be so at the next look."""
        return int(self._pid.read_text()) if self.running and self._pid.exists() else -1

    @property
    def processes(self) -> list[int]:
        """The process ids of the server, without its holder and guards."""
        return guard.descendants(pid)[2:] if (pid := self.pid) > 0 else []

    def relaunch(self) -> None:
        """End what is left of it and start it again, without waiting for it.

        One that another command has started since is left to start.
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
        """End every process of the server at once."""
        pid = self.pid
        for one in [pid, *guard.descendants(pid)] if pid > 0 else []:  # to -1 it would be a signal to every process
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        await_free(self._holder, END_SECONDS)

    def stop(self) -> None:
        """Use it no longer; it ends with its last user."""
        if self._using is not None:
            os.close(self._using)
            self._using = None
            if (alone := take(self._users)) is not None:
                os.close(alone)
            if alone is not None or is_held(self._users):  # by its holder, which ends it already
                await_free(self._holder, END_SECONDS)

    def _end(self) -> None:
        """The holder's end is the server's."""
        if (pid := self.pid) > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            if not await_free(self._holder, END_SECONDS):
                self.kill()


def _secret(file: Path) -> str:
    """The same for server and clients; an empty one is what a full disk leaves."""
    if not file.exists() or not file.read_text():
        write_secret(file, new_auth())
    return file.read_text()


def hold(home: Path, lock: int) -> None:
    """Run the server until nobody uses it, or it ends."""
    known, folder = addresses(home), home / "prefect"
    server = PrefectServer(
        home, port=known["prefect"], auth=_secret(folder / "auth"), database=known.get("database", "")
    )
    server.passed_on = (lock,)
    with server:
        while server.running and take(folder / "users") is None:  # who has it then keeps it to the end
            time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    hold(Path(sys.argv[1]), int(sys.argv[2]))
