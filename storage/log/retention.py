"""Decides which objects of a version must stay in storage: the weights, and the learner's state.

- Weights stay for the newest `keep_last` versions and for every `keep_every`-th version, version 0 included.
- State stays for the newest version, for version 0, and for the *base* of every kept version. The base of a version is
  the newest earlier version that stored the learner's state. A base also keeps its weights, so that the kept version
  can be trained again from the base and the later batches.

Batches always stay. An object that is not needed at some version is not needed at any later version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["weights", "state"]
KINDS: tuple[Kind, ...] = ("weights", "state")


@dataclass(frozen=True, slots=True)
class Retention:
    """The retention rules of one run. The module's docstring describes them."""

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
        """Return whether these objects of `version` must exist. Once false, it stays false as `latest` grows."""
        if kind == "weights" and self.keeps(version, latest):
            return True
        return version in (0, latest) or self._is_base(version, latest)

    @property
    def window(self) -> int:
        """The number of versions before the newest one that may still be released."""
        return self.keep_last + self.state_every + 1

    def _is_base(self, version: int, latest: int) -> bool:
        """Return whether this version is the base of a kept version, or of the next version that will be kept."""
        if not self.stores_state(version):
            return False
        last = version + self.state_every  # the last version that can be trained again from this one
        return last > latest - self.keep_last or last // self.keep_every > version // self.keep_every
