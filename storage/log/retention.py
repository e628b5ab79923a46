"""Decides which stored objects of a policy version (weights and learner's state) are kept and which are deleted.

Weights are kept for the newest `keep_last` versions and for every `keep_every`-th version, including version 0. The
learner's state is kept for the newest version, for version 0, and for the *base* of each version with kept weights. The
base of a version is the newest earlier version that stored the learner's state, and its weights are also kept, so that
a replay can train again from the base. An object that is not needed at one time is never needed later.

A version whose weights are stored as a delta needs the weights of the version before. With `full_every` = k, the
weights of every k-th version are stored whole (a *full* version). So the weights of a version are kept together with
the weights of all earlier versions back to the last full version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["weights", "state"]
KINDS: tuple[Kind, ...] = ("weights", "state")


@dataclass(frozen=True, slots=True)
class Retention:
    """The rules of one run that decide which stored objects are kept."""

    keep_last: int = 5
    keep_every: int = 10
    state_every: int = 1
    full_every: int = 1

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
        if kind == "state":
            return version in (0, latest) or self._is_base(version, latest)
        # deltas of later versions, up to the next full version, may need these weights
        last = version if version > latest else min(latest, self.full_before(version) + self.full_every - 1)
        return any(self._needs_weights(number, latest) for number in range(version, last + 1))

    def full_before(self, version: int) -> int:
        """Return the newest policy version up to `version` whose weights are stored whole."""
        return version - version % self.full_every

    def _needs_weights(self, version: int, latest: int) -> bool:
        """Return whether the weights of this policy version are needed by themselves, and not only to rebuild later
        versions.
        """
        return self.keeps(version, latest) or version in (0, latest) or self._is_base(version, latest)

    @property
    def window(self) -> int:
        """The number of policy versions, counted back from the newest, whose stored objects may still have to be
        pruned."""
        return self.keep_last + self.state_every + self.full_every

    def _is_base(self, version: int, latest: int) -> bool:
        """Return whether the replay of a kept version, or of the next version to be kept, starts from policy version
        `version`.
        """
        if not self.stores_state(version):
            return False
        last = version + self.state_every  # the newest policy version whose replay starts from `version`
        return last > latest - self.keep_last or last // self.keep_every > version // self.keep_every
