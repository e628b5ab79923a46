"""Defines the limits of an episode, checks its stop strings, and measures how long its environment computes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace


@dataclass(slots=True)
class ComputedTime:
    """How long an environment has computed, in seconds."""

    turn: float = 0.0  # seconds in the current turn (before the first turn: in the setup)
    episode: float = 0.0  # seconds in the whole episode, including its setup
    is_setup: bool = True  # True before the first generation

    def add(self, seconds: float) -> None:
        """Add seconds in which the environment has computed."""
        self.turn += seconds
        self.episode += seconds

    def begin_turn(self) -> None:
        """Begin the time of a new turn, after the policy has generated a response."""
        self.turn, self.is_setup = 0.0, False


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """The limits of each episode in the config section `[environment]`; None means no limit."""

    max_turns: int | None = None
    max_turn_tokens: int | None = None
    max_episode_tokens: int | None = None
    setup_seconds: float | None = None  # None: `turn_seconds` is used
    turn_seconds: float | None = None
    episode_seconds: float | None = None
    unparsable_penalty: float = 0.0

    def find_reached(self, turns: int, tokens: int) -> str:
        """Return why an episode with this number of turns and sampled tokens may have no further turn; "" if it may
        have one.
        """
        if self.max_turns is not None and turns >= self.max_turns:
            return f"the episode reached environment.max_turns = {self.max_turns}"
        if self.max_episode_tokens is not None and tokens >= self.max_episode_tokens:
            return f"the episode reached environment.max_episode_tokens = {self.max_episode_tokens}"
        return ""

    def bound_turn(self, room: int, tokens: int) -> int:
        """Return the largest number of tokens of the next turn, after `tokens` sampled tokens in the episode."""
        if self.max_turn_tokens is not None:
            room = min(room, self.max_turn_tokens)
        return room if self.max_episode_tokens is None else min(room, self.max_episode_tokens - tokens)

    @property
    def has_deadline(self) -> bool:
        """True if the computing time of the environment is limited."""
        return any(limit is not None for limit in (self.setup_seconds, self.turn_seconds, self.episode_seconds))

    def bound_seconds(self, used: ComputedTime) -> tuple[float, str]:
        """Return the seconds for which an environment may still compute, and the error message if it computes for
        longer. Without a limit, the seconds are infinite.
        """
        turn = "setup_seconds" if used.is_setup and self.setup_seconds is not None else "turn_seconds"
        bounds = [
            (limit - seconds, f"the environment took more than environment.{name} = {limit:g} s")
            for name, seconds in ((turn, used.turn), ("episode_seconds", used.episode))
            if (limit := getattr(self, name)) is not None
        ]
        return min(bounds, default=(math.inf, ""))

    def scale_tokens(self, tick: int) -> EpisodeLimits:
        """Return the limits of a simulated episode in which each token stands for `tick` real tokens."""
        turn, episode = (
            None if limit is None else math.ceil(limit / tick)
            for limit in (self.max_turn_tokens, self.max_episode_tokens)
        )
        return replace(self, max_turn_tokens=turn, max_episode_tokens=episode)


NO_LIMITS = EpisodeLimits()


class StepClock:
    """A clock that measures nothing, for an environment without time limits."""

    def go_on(self, *, turn_ended: bool = False) -> None:
        """Start counting time, because the environment computes from now on. If `turn_ended` is true, the time
        belongs to the next turn."""

    def pause(self) -> None:
        """Stop counting time, because the environment waits for the policy or the scorer, or has ended."""


NO_CLOCK = StepClock()


class TurnClock(StepClock):
    """Measures the time for which an environment computes, without its waits for generations and scores.

    An environment may have several waits at once; time is counted again when all of them have ended.
    """

    def __init__(self, limits: EpisodeLimits, expire: Callable[[str], None]) -> None:
        """Create the clock, which does not count time yet. `expire` is called with the reason when the environment has
        computed for too long.
        """
        self._limits, self._expire = limits, expire
        self._used, self._since = ComputedTime(), 0.0
        self._handle: asyncio.TimerHandle | None = None
        self._waits = 1  # number of waits that have not ended; the first call of `go_on` ends the first wait

    def go_on(self, *, turn_ended: bool = False) -> None:
        """Start counting time, because the environment computes from now on. If `turn_ended` is true, the time
        belongs to the next turn."""
        if turn_ended:
            self._used.begin_turn()
        self._waits -= 1
        if self._waits:
            return
        loop = asyncio.get_running_loop()
        self._since = loop.time()
        seconds, reason = self._limits.bound_seconds(self._used)
        if reason:
            self._handle = loop.call_later(max(0.0, seconds), self._expire, reason)

    def pause(self) -> None:
        """Stop counting time, because the environment waits for the policy or the scorer, or has ended."""
        self._waits += 1
        if self._handle is not None:
            self._used.add(asyncio.get_running_loop().time() - self._since)
            self._handle.cancel()
            self._handle = None


def check_stops(stop: Sequence[str]) -> tuple[str, ...]:
    """Return stop strings as a tuple.

    Raises:
        ValueError: a stop string is empty, is not a string, or is not valid Unicode, so no engine could search for it.
    """
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if wrong := [one for one in stops if not isinstance(one, str)]:
        raise ValueError(f"the stop string {wrong[0]!r} is not a string; decode a token to its text")
    for one in stops:
        one.encode()  # a lone surrogate raises a `ValueError`
    if "" in stops:
        raise ValueError("a stop string must not be empty; leave it out")
    return stops
