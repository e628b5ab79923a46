"""The environment of one episode in a worker process on a host.

An episode stays on its host. If the host is lost, the episode can continue on another host in two cases: no action was
done since its newest snapshot; or no action was done at all, and a new reset gives the same observation. Otherwise, the
episode is unjudged, because the policy cannot have caused the loss.

    open, reset, snapshot 1, step --host lost--> open, reset, restore 1, step     on another host

The host enforces the time limits. On another host, the time limits begin again. A host counts as lost if it has not
answered `answer_seconds` after the longest time that a request may take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Outcome
from rollflow.tasks.environments.foreign.faults import WorldEnded
from rollflow.tasks.environments.foreign.guest_process import decode_line
from rollflow.tasks.environments.foreign.health import EnvironmentHealth
from rollflow.tasks.environments.foreign.pool import STUCK_SECONDS
from rollflow.tasks.environments.foreign.settings import WorldSettings
from rollflow.tasks.environments.foreign.world import OPENING, World
from rollflow.tasks.environments.guest.wire import pack_line
from rollflow.tasks.environments.limits import ComputedTime
from rollflow.tasks.environments.spread.fleet import HostFleet, HostPlace
from rollflow.tasks.environments.spread.host import HostAnswer
from rollflow.tasks.scorers.spread.members import PlaceLost

MOST_MOVES = 3  # largest number of moves to another host; an episode that loses more hosts may itself cause the losses
MOVE_SECONDS = 600.0  # longest time, in seconds, for which an episode of a lost host waits for a place on another host
ACTIONS = ("call", "step")


class WorldOwner(Protocol):
    """The pool of an environment, which owns the `RemoteWorld` of each of its episodes."""

    fleet: HostFleet
    number: int  # number of the environment

    def release(self, place: HostPlace, episode: int) -> None:
        """Kill the process of an episode in the background; then another episode may use its room."""

    def note_counts(self, place: HostPlace, counts: Sequence[float]) -> None:
        """Add what a host has counted since its last answer."""


@dataclass(frozen=True, slots=True)
class _StateRequest:
    """A request that changes the state of the environment, its time limit, and the text of its answer."""

    line: bytes
    seconds: float | None = None
    text: Any = None


class RemoteWorld(World):
    """The environment of one episode, in a worker process on a host."""

    def __init__(self, pool: WorldOwner, config: WorldSettings, health: EnvironmentHealth) -> None:
        super().__init__(config, health)
        self._pool = pool
        self._place: HostPlace | None = None
        self._number = 0
        self._turn_begins = False
        self._moves = 0
        self._state: dict[str, _StateRequest] = {}  # requests that lead to the newest known state
        self._acted = False  # True if an action was done since the newest known state
        self._has_key = False  # True if a key identifies the newest action

    @property
    def is_running(self) -> bool:
        """True if the process has started, and was not killed."""
        return self._place is not None

    async def start(self) -> None:
        """Start the worker process of the episode on the host with the fewest episodes.

        Raises:
            WorldEnded: the process cannot be started.
        """
        try:
            await self._start_process()
        except PlaceLost as lost:
            await self._move(lost, "open")

    async def exchange_line(self, line: bytes, what: str, seconds: float | None = None) -> Mapping[str, Any]:
        """Send a request as a line, and return the answer, as `World.exchange_line` specifies."""
        while True:
            try:
                answer = await self._send(line, what, seconds)
            except PlaceLost as lost:
                await self._move(lost, what)
                continue
            self._note_state(line, what, seconds, answer)
            return answer

    def begin_turn(self) -> None:
        """Record that the policy has generated a turn, so that the time limit of a turn begins again."""
        super().begin_turn()
        self._turn_begins = True

    def kill(self) -> None:
        """Kill the process and all processes that it has started."""
        if self._place is not None:
            self._pool.release(self._place, self._number)
            self._place = None

    async def _act(self, request: Mapping[str, Any], key: str, seconds: float | None = None) -> Mapping[str, Any]:
        """Do an action, as `World._act` specifies, and record whether it has a key."""
        self._has_key = bool(key) and bool(self.described.get("begins_actions"))
        return await super()._act(request, key, seconds)

    async def _start_process(self, wait_seconds: float | None = None) -> None:
        """Start the process on a host; wait at most `wait_seconds` until a host has room."""
        try:
            async with asyncio.timeout(wait_seconds):
                self._place = place = await self._pool.fleet.claim_place(self._pool.number)
        except TimeoutError:
            raise PlaceLost(f"no other environment actor had room for the episode within {wait_seconds:g} s") from None
        self._number = next(self._pool.fleet.numbers)
        # If imports fail, an episode waits for the imports of all episodes of the host that began before it.
        imports = self._config.at_once * (self._config.start_seconds + STUCK_SECONDS)
        longest = imports + self._pool.fleet.answer_seconds
        given = (self._number, self._pool.number, self._config, self._health.name)
        self._check_host(place, await place.call(longest, "open_episode", *given))

    async def _send(self, line: bytes, what: str, seconds: float | None) -> Mapping[str, Any]:
        """Send a request to the host; raise `PlaceLost` if the host is lost."""
        if (place := self._place) is None:
            raise WorldEnded(Outcome.UNJUDGED, f"the environment's process had ended before {what}")
        longest = self._bound_seconds(what, seconds)[0] + self._pool.fleet.answer_seconds
        turn_begins, self._turn_begins = self._turn_begins, False
        given = (self._number, line, what, seconds, turn_begins)
        answer = await place.call(longest, "exchange_line", *given)
        try:
            return decode_line(self._check_host(place, answer).line)
        except ValueError:
            outcome = Outcome.UNJUDGED if what in OPENING else Outcome.KILLED
            raise self._end(outcome, f"the environment's process wrote no valid answer to {what}") from None

    def _check_host(self, place: HostPlace, answer: HostAnswer) -> HostAnswer:
        """Return the answer of a host, or raise the error that it reports."""
        self._pool.note_counts(place, answer.counts)
        if answer.refusal:
            raise ConfigError(answer.refusal)
        if answer.outcome is not None:
            self.kill()
            raise WorldEnded(answer.outcome, answer.reason)
        return answer

    def _note_state(self, line: bytes, what: str, seconds: float | None, answer: Mapping[str, Any]) -> None:
        """Remember the requests after which an environment is in the state that it has now."""
        if what in ACTIONS:
            self._acted = True
        elif what == "snapshot" and isinstance(answer.get("data"), str):
            self._state["restore"], self._acted = _StateRequest(pack_line({"do": "restore", **answer})), False
        elif what in ("open", "reset", "restore"):
            self._state[what] = _StateRequest(line, seconds, answer.get("text"))

    async def _move(self, lost: PlaceLost, what: str) -> None:
        """Continue the episode on another host, where `what` is the next request.

        Raises:
            WorldEnded: the state of the environment is not known.
        """
        self._give_up_place()
        if what == "close":
            raise WorldEnded(Outcome.UNJUDGED, "the environment's process ended together with its environment actor")
        in_turn, self._used = not self._used.is_setup, ComputedTime()
        while True:
            if self._moves >= MOST_MOVES or not self._is_state_known(what):
                raise self._name_loss(lost)
            self._moves += 1
            try:
                await self._start_process(MOVE_SECONDS)
                await self._repeat_requests()
            except PlaceLost as again:
                self._give_up_place()
                lost = again
                continue
            if in_turn:
                self.begin_turn()
            return

    async def _repeat_requests(self) -> None:
        """Send the requests that bring a new process to the newest known state."""
        for what, request in self._state.items():
            try:
                answer = await self._send(request.line, what, request.seconds)
            except WorldEnded as ended:
                ended.outcome = Outcome.UNJUDGED  # the policy cannot have caused the repeated request to fail
                raise
            if wrong := [answer[key] for key in ("error", "fault", "lost") if key in answer]:
                raise WorldEnded(
                    Outcome.UNJUDGED, f"{what} was repeated on another node, and failed there with {wrong[0]}"
                )
            if "restore" not in self._state and answer.get("text") != request.text:
                raise self._name_loss(
                    PlaceLost(f"{what} was repeated on another node, and gave another observation there")
                )

    def _is_state_known(self, what: str) -> bool:
        """Return whether another host can bring the environment to the state before the request `what`."""
        if self._acted:
            return False
        return what not in ACTIONS or self._has_key or self.described.get("can_replay") is not False

    def _give_up_place(self) -> None:
        """Give up the place on a lost host."""
        if self._place is not None:
            self._pool.fleet.free_place(self._place, self._pool.number)
            self._place = None

    def _name_loss(self, lost: PlaceLost) -> WorldEnded:
        """Return the error of an episode that cannot continue. While other hosts run, a lost host does not count in
        `failures_in_a_row`.
        """
        ended = WorldEnded(Outcome.UNJUDGED, f"its environment actor is lost: {lost}")
        if self._pool.fleet.places:
            ended.is_counted = True
            self._health.failures += 1
        return ended
