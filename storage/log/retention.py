"""Which objects of a version must stay, by kind: its weights, and the learner's state.

- Weights: of the newest `keep_last` versions and every `keep_every`-th; version 0 is one of these.
- State: of the newest version, version 0, and the *base* of every kept version: the newest version before it that
  stored the learner's state. From its base (its weights, too) and the batches after it a kept version can be trained
  again.

Batches stay. An object that is no longer needed is never needed again, however long the run goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["weights", "state"]
KINDS: tuple[Kind, ...] = ("weights", "state")


@dataclass(frozen=True, slots=True)
class Retention:
    """The rules of one run. See the module's docstring."""

    keep_last: int = 5
    keep_every: int = 10
    state_every: int = 1

    def keeps(self, version: int, latest: int) -> bool:
        """Whether the weights of `version` are kept when `latest` is the newest version."""
        return version > latest - self.keep_last or version % self.keep_every == 0

    def stores_state(self, version: int) -> bool:
        """Whether `version` is published with the learner's state."""
        return version % self.state_every == 0

    def needed(self, kind: Kind, version: int, latest: int) -> bool:
        """Whether these objects of `version` must be there. Once false it stays false as `latest` grows."""
        if kind == "weights" and self.keeps(version, latest):
            return True
        return version in (0, latest) or self._is_base(version, latest)

    @property
    def window(self) -> int:
        """How many versions before the newest may still be released."""
        return self.keep_last + self.state_every + 1

    def _is_base(self, version: int, latest: int) -> bool:
        """Whether this version is the base of one that is kept, or of the next one that will be."""
        if not self.stores_state(version):
            return False
        last = version + self.state_every  # the last version that is trained again from this one
        return last > latest - self.keep_last or last // self.keep_every > version // self.keep_every
