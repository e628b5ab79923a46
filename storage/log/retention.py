"""Decides which objects of a version stay in storage. The objects of a version are its weights and the learner's state.

Weights stay for the newest `keep_last` versions and for every `keep_every`-th version, version 0 included. The
learner's state stays for the newest version, for version 0, and for the *base* of every version whose weights stay. The
base of a version is the newest earlier version that stored the learner's state. The weights of a base stay with its
state, so that a replay can train from the base and the later batches.

The files of batches are never pruned. An object that the run does not need at some version is not needed at any later
version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["weights", "state"]
KINDS: tuple[Kind, ...] = ("weights", "state")


@dataclass(frozen=True, slots=True)
class Retention:
    """The retention rules of one run, as the module's docstring describes them."""

    keep_last: int = 5
    keep_every: int = 10
    state_every: int = 1

    def keeps(self, version: int, latest: int) -> bool:
        """Return whether the weights of `version` are kept when `latest` is the newest version."""
        return version > latest - self.keep_last or version % self.keep_every == 0

    def stores_state(self, version: int) -> bool:
        """Return whether `version` is published with the learner's state."""
        return version % self.state_every == 0

    def is_needed(self, kind: Kind, version: int, latest: int) -> bool:
        """Return whether the weights or the state (`kind`) of `version` must be kept while `latest` is the newest
        version.

        Once this method returns false for a version, it returns false for every greater `latest`.
        """
        if kind == "weights" and self.keeps(version, latest):
            return True
        return version in (0, latest) or self._is_base(version, latest)

    @property
    def window(self) -> int:
        """The number of versions, counted back from the newest, whose objects may still have to be pruned."""
        return self.keep_last + self.state_every + 1

    def _is_base(self, version: int, latest: int) -> bool:
        """Return whether the replay of a kept version, or of the next version that will be kept, starts from
        `version`.
        """
        if not self.stores_state(version):
            return False
        last = version + self.state_every  # the newest version whose replay starts from `version`
        return last > latest - self.keep_last or last // self.keep_every > version // self.keep_every
