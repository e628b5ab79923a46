"""Records of the turns of an episode: where each turn starts, in which state it acted, and which reward it got.

Positions count the tokens behind the prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollflow.storage.records import UNNAMED_STATE
from rollflow.storage.token_arrays import Int64s


@dataclass(eq=False, slots=True)
class TurnRecords:
    """The turns of an episode so far. A generation without a token is no turn."""

    starts: list[int] = field(default_factory=list)  # position of the first token of each turn
    states: list[int] = field(default_factory=list)  # hash of the state of each turn
    rewards: dict[int, float] = field(default_factory=dict)  # position of the last token of a turn -> reward
    _last: int = -1  # position of the last token of the newest turn
    _upcoming: int = UNNAMED_STATE  # hash of the state of the next turn

    def add_turn(self, start: int, end: int) -> None:
        """Record a turn whose tokens are those from `start` up to `end`, which is not included."""
        self.starts.append(start)
        self.states.append(self._upcoming)
        self._last, self._upcoming = end - 1, UNNAMED_STATE

    def add_reward(self, value: float) -> None:
        """Add a reward to the newest turn.

        Raises:
            ValueError: there is no turn yet.
        """
        if self._last < 0:
            raise ValueError("the episode has no turn yet; give a reward after `generate` has returned a generation")
        self.rewards[self._last] = self.rewards.get(self._last, 0.0) + value

    def enter_state(self, key: str) -> None:
        """Set the state of the next turn."""
        self._upcoming = hash_state(key)

    def find_starts(self, prompt: int) -> tuple[int, ...]:
        """Return the position of each turn in a trajectory whose prompt has `prompt` tokens."""
        return tuple(start + prompt for start in self.starts)

    def find_states(self) -> Sequence[int] | None:
        """Return the state of each turn; None if no state has a name."""
        return Int64s.of(self.states) if any(state != UNNAMED_STATE for state in self.states) else None


def hash_state(key: str) -> int:
    """Return the 64-bit hash of an environment state's name, which is never `UNNAMED_STATE`.

    Raises:
        TypeError: the name is not a string.
    """
    if not isinstance(key, str):
        raise TypeError(f"the key of a state is a {type(key).__name__}, not a string")
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True) or 1
