"""Starts, watches and ends the members of a fleet (actors that share work); the amount of work decides their number.

    decide --> fewer members than wanted: start one --> watch --> end
           `-> more than wanted: the newest ones get no more work, and end once their work is done

- `FleetLink.end` is called for each member whose start was begun, so no process of a member remains.
- A lost member is replaced after a pause. The pause doubles each time a member is lost soon after its start.
- A member that is about to end continues if the work grows again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from rollflow.storage.errors import RollflowError

LOOK_SECONDS = 1.0  # seconds between two checks of the amount of work
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds between the loss of a member and the start of another one


class PlaceLost(RollflowError):
    """Raised if a member of a fleet cannot start, is gone, or does not answer, for a reason that its work has not
    caused."""


class FleetLink(Protocol):
    """The connection to a member of a fleet."""

    async def start(self) -> None:
        """Start the member; raise `PlaceLost` if it cannot start."""

    async def end(self) -> None:
        """End the member with all its processes, without raising an error; may be called at any time."""


Link = TypeVar("Link", bound=FleetLink)
Place = TypeVar("Place")


@dataclass(eq=False, slots=True)
class FleetMember(Generic[Link, Place]):
    """A member of a fleet; `place`, to which work is sent, is None until the member has started."""

    link: Link
    task: asyncio.Task[None] | None = None
    place: Place | None = None
    stays: bool = True  # False if the member ends once its work is done
    is_retry: bool = False  # True if a member was lost before this start, and none has started since


class MemberFleet(Generic[Link, Place]):
    """Keeps as many members running as the work needs. A subclass distributes the work."""

    loss = "a member is lost"  # beginning of the warning about a lost member

    def __init__(self, build: Callable[[], Link], warn: Callable[[str], None]) -> None:
        """Create the fleet without members; `build` creates the connection to a member that is not started yet."""
        self._build, self._warn = build, warn
        self._members = list[FleetMember[Link, Place]]()  # sorted by the time of their starts
        self._tasks = set[asyncio.Task[None]]()  # a task may end after its member was removed from the members
        self._pause, self._not_before = FIRST_PAUSE, 0.0
        self._retries = False  # True if a member was lost, and none has started since

    @property
    def count(self) -> int:
        """Number of members that have started and not ended."""
        return sum(member.place is not None for member in self._members)

    async def run(self) -> None:
        """Keep as many members as `_decide` returns until the task is cancelled; then end all members."""
        try:
            while True:
                self._follow(asyncio.get_running_loop().time())
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            for member in self._members:  # a member that is already ending is not in the list any more
                if member.task:
                    member.task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _decide(self, now: float) -> int:
        """Return the number of members that the work needs at the time `now`, in seconds."""
        raise NotImplementedError

    def _open(self, member: FleetMember[Link, Place]) -> Place:
        """Return the object that receives the work of a member that has started."""
        raise NotImplementedError

    async def _watch(self, member: FleetMember[Link, Place], place: Place) -> None:
        """Wait until a member has no work and is no longer needed; raise `PlaceLost` if the member is lost."""
        raise NotImplementedError

    def _close(self, place: Place) -> None:
        """Let the unfinished work of a member that ends fail with `PlaceLost`."""
        raise NotImplementedError

    def _share_work(self) -> None:
        """Send waiting work to the members. No new work is sent to members that do not stay."""
        raise NotImplementedError

    def _note_loss(self, reason: str) -> None:
        """React to the loss of a member, which is already removed from the fleet."""

    def _follow(self, now: float) -> None:
        wanted = self._decide(now)
        for number, member in enumerate(self._members):
            member.stays = number < wanted
        self._share_work()  # a member that was about to end may accept work again
        if now >= self._not_before:
            for _ in range(wanted - len(self._members)):
                member = FleetMember[Link, Place](self._build(), is_retry=self._retries)
                self._members.append(member)
                member.task = asyncio.create_task(self._keep(member))
                self._tasks.add(member.task)
                member.task.add_done_callback(self._tasks.discard)

    async def _keep(self, member: FleetMember[Link, Place]) -> None:
        """Start a member, and watch it until it is lost or no longer needed; then end it."""
        began, lost = asyncio.get_running_loop().time(), ""
        try:
            await member.link.start()
            member.place, self._retries = self._open(member), False
            self._share_work()
            await self._watch(member, member.place)
        except Exception as error:  # noqa: BLE001 - whatever the error is, the next start must wait
            self._plan_restart(began)
            lost = str(error) if isinstance(error, PlaceLost) else f"{type(error).__name__}: {error}"
            self._warn(f"{self.loss}: {lost}")
        finally:
            self._members.remove(member)
            if member.place is not None:
                self._close(member.place)
            if lost:
                self._note_loss(lost)
            await member.link.end()

    def _plan_restart(self, began: float) -> None:
        now, self._retries = asyncio.get_running_loop().time(), True
        if now - began > LONGEST_PAUSE:
            self._pause = FIRST_PAUSE
        self._not_before = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
