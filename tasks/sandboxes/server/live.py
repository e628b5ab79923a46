"""The running sandboxes of ROCK's protocol, each of which exists until its caller stops it.

* At most `most` sandboxes exist at the same time.
* A sandbox without a request for `clear_seconds` is stopped, so that a dead caller leaves no sandboxes behind.
* A failed sandbox is removed at the next request or periodic check.
* `close` ends every sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rollflow.tasks.sandboxes.base import Sandboxes, SandboxFailed, SandboxLimits, SandboxSession, SessionKind
from rollflow.tasks.sandboxes.workspace import BoxWorkspace

CHECK_SECONDS = 1.0
MOST_SESSIONS = 16  # largest number of sessions of one sandbox
MOST_ENDED = 1000  # largest number of stopped sandboxes whose state is remembered
TEMPORARY = re.compile(r"bash-\d+")  # names of sessions that ROCK's SDK opens for a single command and never closes
IDENTITY = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class Refused(Exception):
    """Raised if a request names a sandbox or a session that does not exist, or asks for something that is not
    allowed.
    """


class NoRoom(Exception):
    """Raised if the server already has its largest number of sandboxes."""


@dataclass
class LiveSandbox:
    """A running sandbox of ROCK's protocol, and the settings with which its caller requested it."""

    identity: str
    workspace: BoxWorkspace
    described: Mapping[str, object]  # image, memory, cpus and disk, as in the request that started the sandbox
    clear_seconds: float
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.monotonic)
    running: int = 0  # number of running requests
    # sessions by name, the least recently used session first
    sessions: OrderedDict[str, SandboxSession] = field(default_factory=OrderedDict)

    def is_forgotten(self) -> bool:
        """Return whether the sandbox has had no request for `clear_seconds`."""
        return not self.running and time.monotonic() - self.used > self.clear_seconds


class LiveSandboxes:
    """Starts, finds and stops the sandboxes of ROCK's protocol."""

    def __init__(self, sandboxes: Sandboxes, most: int) -> None:
        self._sandboxes, self._most = sandboxes, most
        self._live: dict[str, LiveSandbox] = {}
        self._starting: set[str] = set()  # ids of sandboxes that are being started
        self._ended: OrderedDict[str, LiveSandbox] = OrderedDict()
        self._checking: asyncio.Task[None] | None = None

    async def start(
        self, identity: str | None, limits: SandboxLimits, described: Mapping[str, object], clear_seconds: float
    ) -> LiveSandbox:
        """Start a sandbox.

        Raises:
            Refused: the sandbox id is already used or has invalid characters.
            NoRoom: the server already has its largest number of sandboxes.
            SandboxFailed: the sandbox could not be started.
        """
        identity = identity or uuid.uuid4().hex
        is_taken = any(identity in known for known in (self._live, self._starting, self._ended))
        if is_taken or not IDENTITY.fullmatch(identity):
            raise Refused(
                f"sandbox_id = {identity!r} is in use, or has characters other than letters, digits, - _ .; "
                "choose another one"
            )
        if len(self._live) + len(self._starting) >= self._most:
            raise NoRoom(
                f"{self._most} sandboxes are running, which is the limit of this server; stop one, or try later"
            )
        self._starting.add(identity)
        try:
            workspace = await self._sandboxes.open_workspace(limits)
        finally:
            self._starting.discard(identity)
        assert isinstance(workspace, BoxWorkspace)
        live = self._live[identity] = LiveSandbox(identity, workspace, described, clear_seconds)
        if self._checking is None:
            self._checking = asyncio.create_task(self._check())
        return live

    def find(self, identity: str) -> LiveSandbox:
        """Return the running sandbox with this id; raise `Refused` if it does not exist."""
        if live := self._live.get(identity):
            return live
        state = "was stopped" if identity in self._ended else "does not exist"
        raise Refused(f"sandbox {identity!r} {state}")

    def find_ended(self, identity: str) -> LiveSandbox | None:
        """Return the stopped sandbox with this id, or None if the id is unknown."""
        return self._ended.get(identity)

    @asynccontextmanager
    async def use(self, identity: str) -> AsyncIterator[LiveSandbox]:
        """Keep a sandbox running during a `with` block, even if it gets no requests; stop it if `SandboxFailed` is
        raised.
        """
        live = self.find(identity)
        live.running += 1
        try:
            yield live
        except SandboxFailed:
            await self.stop(identity)
            raise
        finally:
            live.running -= 1
            live.used = time.monotonic()

    async def is_alive(self, identity: str) -> bool:
        """Return whether a sandbox answers; stop it if it does not."""
        if (live := self._live.get(identity)) is None:
            return False
        if not (alive := await live.workspace.is_alive()):
            await self.stop(identity)
        return alive

    async def stop(self, identity: str) -> bool:
        """Stop a sandbox; return False if no running sandbox has this id."""
        if (live := self._live.pop(identity, None)) is None:
            return False
        self._ended[identity] = live
        while len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)
        live.sessions.clear()
        await live.workspace.close()
        return True

    def forget(self, identity: str) -> None:
        """Remove the remembered state of a stopped sandbox."""
        self._ended.pop(identity, None)

    async def close(self) -> None:
        """Stop every sandbox."""
        if self._checking:
            self._checking.cancel()
            await asyncio.gather(self._checking, return_exceptions=True)
        await asyncio.gather(*(self.stop(identity) for identity in list(self._live)))

    async def _check(self) -> None:
        """Stop inactive and failed sandboxes, in an endless loop."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            for identity, live in list(self._live.items()):
                if live.is_forgotten() or live.workspace.has_failed():
                    with contextlib.suppress(SandboxFailed):
                        await self.stop(identity)


async def open_session(
    live: LiveSandbox, name: str, kind: SessionKind, env: Mapping[str, str], start: Sequence[str]
) -> None:
    """Open a session of this name.

    Raises:
        Refused: a session with this name exists, or the sandbox has its largest number of sessions.
        SandboxFailed: the sandbox failed.
    """
    if name in live.sessions:
        raise Refused(f"session {name!r} already exists in this sandbox; choose another name")
    if len(live.sessions) >= MOST_SESSIONS:
        old = next((one for one in live.sessions if TEMPORARY.fullmatch(one)), None)
        if old is None:
            raise Refused(f"the sandbox already has {MOST_SESSIONS} sessions, the limit; close one")
        await live.sessions.pop(old).close()
    live.sessions[name] = await live.workspace.open_session(kind, env, start)


def find_session(live: LiveSandbox, name: str) -> SandboxSession:
    """Return the session with this name; raise `Refused` if it does not exist."""
    if name not in live.sessions:
        raise Refused(f"session {name!r} does not exist in this sandbox")
    live.sessions.move_to_end(name)
    return live.sessions[name]
