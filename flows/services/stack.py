"""Finds the stack (the set of servers that `rollflow serve` runs for a run home), waits for it, and ends it.

    up.lock    locked by the process that serves, as long as this process lives
    up.json    what another command needs to use the stack; readable by this user only, because it contains secrets
    up.keeper  locked by the process that restarts the stack (`keepalive.stack`), if any; contains its process id

These files are in the run home.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rollflow.flows.services.locks import PROBE_SECONDS, await_free, is_held, take_within
from rollflow.flows.services.process import Service, write_secret
from rollflow.storage.errors import ConfigError, Unreachable

END_SECONDS = 90.0
KEEPER = "up.keeper"


@dataclass(frozen=True)
class Stack:
    """The addresses of the stack, which is the set of servers that `rollflow serve` runs. `environment` contains the
    environment variables that a process needs to use these servers.
    """

    pid: int
    page: str
    login: str
    mlflow: str
    environment: Mapping[str, str]

    @property
    def pages(self) -> str:
        """The addresses of the web pages of `rollflow serve`, as text for the user."""
        return f"Prefect {self.page}/deployments{self.login}\nMLflow  {self.mlflow}"


class BorrowedStack(Service):
    """The servers of `rollflow serve`, as seen by another command, which uses them but cannot restart them."""

    def __init__(self, home: Path) -> None:
        super().__init__(home / "logs" / "up.log", start_seconds=1.0)
        self._home = home

    @property
    def what(self) -> str:
        return f"the servers of `rollflow serve` in {self._home}"

    @property
    def running(self) -> bool:
        """True if `rollflow serve` is running, or the process that restarts it."""
        return is_held(self._home / "up.lock") or is_held(self._home / KEEPER)

    @property
    def pid(self) -> int:
        """Always 0, because the processes of `rollflow serve` do not belong to this command."""
        return 0

    @property
    def processes(self) -> list[int]:
        return []

    def launch(self) -> None:
        """Do nothing, because this command does not start the servers of `rollflow serve`."""

    relaunch = launch

    def _command(self) -> Sequence[str]:
        return ()

    def _environment(self) -> Mapping[str, str]:
        return {}

    def _ready(self) -> bool:
        return find(self._home) is not None


def find(home: Path) -> Stack | None:
    """Return the stack (the servers of `rollflow serve`) that runs in this run home, or None."""
    if not is_held(home / "up.lock"):
        return None
    try:
        return Stack(**json.loads((home / "up.json").read_text()))
    except FileNotFoundError:  # the servers are still starting
        return None


def came_up(home: Path, pid: int) -> bool:
    """Return whether the servers of process `pid` have started successfully in this run home, even if they have crashed
    since.
    """
    file = home / "up.json"
    return file.exists() and bool(json.loads(file.read_text())["pid"] == pid)


@contextlib.contextmanager
def hold_stack(home: Path) -> Iterator[None]:
    """Hold the file lock `up.lock` during a `with` block, so that no other `rollflow serve` runs in this run home.

    Raises:
        ConfigError: another `rollflow serve` runs in this run home.
    """
    held = take_within(home / "up.lock", PROBE_SECONDS)
    if held is None:
        found = find(home)
        where = f"\n{found.pages}" if found else ""
        raise ConfigError(
            f"the servers of {home} are already running; end them first with `rollflow serve --end`{where}"
        )
    (home / "up.json").unlink(missing_ok=True)
    try:
        yield
    finally:
        (home / "up.json").unlink(missing_ok=True)
        os.close(held)


@contextlib.contextmanager
def hold_keeper(home: Path) -> Iterator[None]:
    """Hold the file lock `up.keeper` during a `with` block, so that no other process restarts the stack (the servers of
    `rollflow serve`).

    Raises:
        ConfigError: another process already restarts the servers of `rollflow serve`.
    """
    held = take_within(home / KEEPER, PROBE_SECONDS)
    if held is None:
        raise ConfigError(
            f"the servers of {home} are already running or starting; end them first with `rollflow serve --end`"
        )
    try:
        os.ftruncate(held, 0)
        os.write(held, str(os.getpid()).encode())
        yield
    finally:
        os.close(held)


def announce(home: Path, stack: Stack) -> None:
    """Write the file `up.json`, in which other commands find the addresses of the stack (the servers of
    `rollflow serve`).
    """
    write_secret(home / "up.json.new", json.dumps(asdict(stack)))
    (home / "up.json.new").replace(home / "up.json")


def end(home: Path) -> bool:
    """End the servers of `rollflow serve` in this run home; return False if none run.

    Raises:
        Unreachable: the servers of `rollflow serve` did not end within `END_SECONDS`.
    """
    pids = [found.pid] if (found := find(home)) else []
    if is_held(home / KEEPER) and (keeper := (home / KEEPER).read_text()):
        # first end the process that restarts the stack, because it would start the servers again
        pids.insert(0, int(keeper))
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    if not all(await_free(home / name, END_SECONDS) for name in ("up.lock", KEEPER) if pids):
        raise Unreachable(
            f"the servers of {home} still run after {END_SECONDS:.0f} s; try again, or end process {pids[0]}"
        )
    return bool(pids)
