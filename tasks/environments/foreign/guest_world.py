"""Sends requests with deadlines to the worker process of one episode, from the event loop."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping
from typing import Any

from rollflow.storage.records import Outcome
from rollflow.tasks.environments.foreign.faults import WorldEnded, judge_status
from rollflow.tasks.environments.foreign.guest_process import Guest, decode_line
from rollflow.tasks.environments.foreign.health import EnvironmentHealth
from rollflow.tasks.environments.foreign.settings import WorldSettings
from rollflow.tasks.environments.foreign.world import OPENING, World
from rollflow.tasks.environments.guest.wire import LONGEST_LINE

CHUNK = 1 << 16
STATUS_SECONDS = 5.0  # longest wait for the exit status of a process that has closed its socket


class GuestWorld(World):
    """The environment of one episode, in a worker process on this machine."""

    def __init__(self, guest: Guest, number: int, config: WorldSettings, health: EnvironmentHealth) -> None:
        super().__init__(config, health)
        self._guest, self._number = guest, number
        self._socket: socket.socket | None = None
        self._buffer = bytearray()

    @property
    def is_running(self) -> bool:
        """True if the process has started, and was not killed."""
        return self._socket is not None

    async def start(self) -> None:
        """Start the worker process of the episode.

        Raises:
            WorldEnded: the keeper, which starts the worker processes, is gone.
        """
        try:
            self._socket = await self._guest.open_episode(self._number)
        except OSError as error:
            raise WorldEnded(Outcome.UNJUDGED, f"the environment's process did not start ({error})") from None

    async def exchange_line(self, line: bytes, what: str, seconds: float | None = None) -> Mapping[str, Any]:
        """Send a request as a line, and return the answer, as `World.exchange_line` specifies."""
        left, late = self._bound_seconds(what, seconds)
        if self._socket is None:
            raise WorldEnded(Outcome.UNJUDGED, f"the environment's process had ended before {what}")
        began = time.monotonic()
        try:
            async with asyncio.timeout(left):
                await asyncio.get_running_loop().sock_sendall(self._socket, line)
                return decode_line(await self._read_line())
        except TimeoutError:
            self._health.hangs += 1
            outcome = Outcome.UNJUDGED if what in OPENING else Outcome.TIMEOUT
            raise self._end(outcome, late) from None
        except (EOFError, OSError):
            raise await self._find_end(what) from None
        except ValueError:
            outcome = Outcome.UNJUDGED if what in OPENING else Outcome.KILLED
            raise self._end(outcome, f"the environment's process wrote no valid answer to {what}") from None
        finally:
            used = time.monotonic() - began
            self._health.seconds += used
            self._used.add(used)

    def kill(self) -> None:
        """Kill the process and all processes that it has started."""
        if self._socket is not None:
            self._guest.kill(self._number)
            self._socket.close()
            self._socket = None

    async def _find_end(self, what: str) -> WorldEnded:
        """Return the error that says how the process has ended."""
        try:
            status = await asyncio.wait_for(asyncio.shield(self._guest.end_of(self._number)), STATUS_SECONDS)
        except TimeoutError:  # the process closed its socket, but still runs
            return self._end(Outcome.UNJUDGED if what in OPENING else Outcome.KILLED, "its process closed its socket")
        self._health.crashes += 1
        self.kill()
        if self._guest.lost.is_set():
            return WorldEnded(Outcome.UNJUDGED, "the keeper of the worker processes ended")
        found = judge_status(status, what)
        return WorldEnded(Outcome.UNJUDGED, str(found)) if what in OPENING else found

    async def _read_line(self) -> bytes:
        """Read one line; raise `EOFError` if the process has closed its socket."""
        loop = asyncio.get_running_loop()
        assert self._socket is not None
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > LONGEST_LINE:
                raise ValueError(f"the environment's process wrote a line of more than {LONGEST_LINE} bytes")
            part = await loop.sock_recv(self._socket, CHUNK)
            if not part:
                raise EOFError
            self._buffer += part
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line
