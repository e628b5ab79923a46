"""The limits of an episode, and the clock that measures how long its environment computes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """The limits that `[environment]` sets for each episode; None: no limit."""

    max_turns: int | None = None
    max_turn_tokens: int | None = None
    max_episode_tokens: int | None = None
    turn_seconds: float | None = None
    episode_seconds: float | None = None
    unparsable_penalty: float = 0.0

    def find_reached(self, turns: int, tokens: int) -> str:
        """Return why an episode with this number of turns and of sampled tokens gets no further turn; "" if it does."""
        for name, used in (("max_turns", turns), ("max_episode_tokens", tokens)):
            limit = getattr(self, name)
            if limit is not None and used >= limit:
                return f"the episode reached environment.{name} = {limit}"
        return ""

    def bound_turn(self, room: int, tokens: int) -> int:
        """Return the largest number of tokens of the next turn, after `tokens` sampled tokens."""
        left = None if self.max_episode_tokens is None else self.max_episode_tokens - tokens
        return min(bound for bound in (room, self.max_turn_tokens, left) if bound is not None)

    @property
    def has_deadline(self) -> bool:
        """True if the environment may compute only for a limited time."""
        return self.turn_seconds is not None or self.episode_seconds is not None

    def bound_seconds(self, turn: float, episode: float) -> tuple[float, str]:
        """Return the seconds that an environment may still compute, and the key that says so, after it has computed for
        `turn` seconds in this turn and for `episode` seconds in all."""
        bounds = [
            (limit - used, f"environment.{name} = {limit:g}")
            for name, limit, used in (
                ("turn_seconds", self.turn_seconds, turn),
                ("episode_seconds", self.episode_seconds, episode),
            )
            if limit is not None
        ]
        return min(bounds)


NO_LIMITS = EpisodeLimits()


class StepClock:
    """A clock that measures nothing, because the environment may compute for any time."""

    def go_on(self, *, turn_ended: bool = False) -> None:
        """Note that the environment computes from now on; with `turn_ended`, in the next turn."""

    def pause(self) -> None:
        """Note that the environment waits for the policy or for the scorer, or has ended."""


NO_CLOCK = StepClock()


class TurnClock(StepClock):
    """Measures the time for which an environment computes, without waits for generations and scores."""

    def __init__(self, limits: EpisodeLimits, expire: Callable[[str], None]) -> None:
        """Call `expire` with the reason once the environment has computed for too long."""
        self._limits, self._expire = limits, expire
        self._turn = self._episode = self._since = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def go_on(self, *, turn_ended: bool = False) -> None:
        """Note that the environment computes from now on; with `turn_ended`, in the next turn."""
        loop = asyncio.get_running_loop()
        self._turn, self._since = 0.0 if turn_ended else self._turn, loop.time()
        seconds, key = self._limits.bound_seconds(self._turn, self._episode)
        self._handle = loop.call_later(max(0.0, seconds), self._expire, f"the environment took more than {key} s")

    def pause(self) -> None:
        """Note that the environment waits for the policy or for the scorer, or has ended."""
        if self._handle is not None:
            used = asyncio.get_running_loop().time() - self._since
            self._turn, self._episode = self._turn + used, self._episode + used
            self._handle.cancel()
            self._handle = None
