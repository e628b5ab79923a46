"""Decides which stored objects of a policy version are kept and which are deleted. The stored objects of a policy
version are the weights and the learner's state.

The weights of the newest `keep_last` policy versions are kept, and the weights of every `keep_every`-th version,
including version 0. The learner's state is kept for the newest policy version, for version 0, and for the *base* of
every version whose weights are kept. The base of a policy version is the newest earlier version that stored the
learner's state. The weights of a base (a policy version with the learner's state) are kept together with the state. A
replay can then train again from the base and the later batches.

The files of trajectory batches are never pruned. A stored object that the run does not need at one policy version is
not needed at any later version either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["weights", "state"]
KINDS: tuple[Kind, ...] = ("weights", "state")


@dataclass(frozen=True, slots=True)
class Retention:
    """The rules of one run for which objects are kept, as the module's docstring describes them."""

    keep_last: int = 5
    keep_every: int = 10
    state_every: int = 1

    def keeps(self, version: int, latest: int) -> bool:
        """Return whether the weights of policy version `version` are kept when `latest` is the newest version."""
        return version > latest - self.keep_last or version % self.keep_every == 0

    def stores_state(self, version: int) -> bool:
        """Return whether policy version `version` is published together with the learner's state."""
        return version % self.state_every == 0

    def is_needed(self, kind: Kind, version: int, latest: int) -> bool:
        """Return whether the weights or the learner's state (`kind`) of policy version `version` must be kept while
        `latest` is the newest version.

        An object that is not needed is never needed later: if the method returns false for one `latest`, it returns
        false for every greater `latest`.
        """
        if kind == "weights" and self.keeps(version, latest):
            return True
        return version in (0, latest) or self._is_base(version, latest)

    @property
    def window(self) -> int:
        """The number of policy versions, counted back from the newest, whose stored objects may still have to be
        pruned."""
        return self.keep_last + self.state_every + 1

    def _is_base(self, version: int, latest: int) -> bool:
        """Return whether training must restart from policy version `version` to recompute a kept version, or the next
        version that will be kept.
        """
        if not self.stores_state(version):
            return False
        last = version + self.state_every  # the newest policy version whose replay starts from `version`
        return last > latest - self.keep_last or last // self.keep_every > version // self.keep_every
