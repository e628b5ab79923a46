"""Mixes prompt sources: chooses the source of the next prompt, so that each source has its configured share of
training.

The shares of the sources define an endless sequence of *slots*, and each slot belongs to one source. Groups of
responses fill the slots of their source in the order of issue; a filtered group fills no slot. The next prompt comes
from the source that owns the first free slot.

    slots         a a b a | a a b a | a ...
    issued        a0 a1 b0 a2 ...        a1 is filtered: one more `a` comes before b1

- At any time, the number of issued groups of each source differs from its share by at most one group. A source whose
  groups are often filtered issues more prompts, so that its share of training stays the same.
- The choice depends only on the counts in a `Cursor`, so that a scheduler that resumes a run makes the same choices.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Cursor


class Mixture:
    """Chooses the source of each new prompt, so that each prompt source gets its configured share."""

    def __init__(self, shares: Sequence[float], issued: Sequence[int] = (), filtered: Sequence[int] = ()) -> None:
        """Continue from the counts of issued and filtered prompts of each source, by default from the beginning."""
        self._slots = Slots(shares)
        self._issued = list(issued) or [0] * len(shares)
        self._filtered = list(filtered) or [0] * len(shares)
        self._closed = set[int]()
        if not len(shares) == len(self._issued) == len(self._filtered):
            raise ValueError(
                f"the number of prompt sources cannot change: the config has {len(shares)}, but there are counts of "
                f"issued prompts for {len(self._issued)} sources, and of filtered prompts for {len(self._filtered)}"
            )

    @property
    def state(self) -> Cursor:
        """The numbers of issued and filtered prompts of each source, to be stored with a batch."""
        return Cursor(tuple(self._issued), tuple(self._filtered))

    def find_next(self) -> tuple[int, int]:
        """Return the source of the next prompt, and the prompt's position in that source."""
        kept = [issued - gone for issued, gone in zip(self._issued, self._filtered, strict=True)]
        source = self._slots.first_free(kept, self._closed)
        return source, self._issued[source]

    def list_next(self, count: int, ends: Mapping[int, int]) -> list[int]:
        """Return the next `count` prompts without issuing them. The list ends before the first prompt whose position in
        its source is not below the source's value in `ends`.
        """
        coming = copy.copy(self)
        coming._issued = list(self._issued)
        found = list[int]()
        while len(found) < count:
            source, position = coming.find_next()
            if position >= ends.get(source, math.inf):
                break
            found.append(coming.next())
        return found

    def next(self) -> int:
        """Issue the next prompt to the rollout and return the prompt's index."""
        source, position = self.find_next()
        self._issued[source] += 1
        return position * len(self._issued) + source

    def close_source(self, source: int, why: str) -> None:
        """Issue no more prompts of this source, because its prompts cannot be played.

        Raises:
            ConfigError: no other source is open.
        """
        self._closed.add(source)
        left_out = f"the newest prompts of prompts.{source} cannot be played ({why})"
        if len(self._closed) == len(self._issued):
            raise ConfigError(f"{left_out}, and no other prompt source is left; correct the environment, and resume")
        logging.getLogger(__name__).warning("%s; the source gets no more prompts until the run is resumed", left_out)

    def note_filtered(self, index: int) -> None:
        """Record that the group of responses of a prompt was filtered, so that its source may issue another prompt."""
        self._filtered[index % len(self._filtered)] += 1


class Slots:
    """An endless sequence of slots that gives each prompt source its configured share.

    Slots are assigned by Tijdeman's solution of the chairman assignment problem (Discrete Mathematics 32, 1980). With D
    prompt sources, the number of slots of a source differs from its exact share by at most 1 - 1 / (2D - 2).
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self._weights = _reduce_shares(shares)  # number of slots of each prompt source in one period of the sequence
        # prompt source -> numbers of the source's slots in one period, as far as computed
        self._assigned: list[list[int]] = [[] for _ in shares]

    def first_free(self, filled: Sequence[int], closed: Collection[int] = ()) -> int:
        """Return the source of the first free slot; `filled` counts the filled slots of each source. The slots of
        `closed` sources are left out.
        """
        counts = enumerate(zip(filled, self._weights, strict=True))
        periods = {source: count // weight for source, (count, weight) in counts if source not in closed}
        first = min(periods.values())
        free = {s: filled[s] - first * self._weights[s] for s, period in periods.items() if period == first}
        while not (
            known := [(self._assigned[s][slot], s) for s, slot in free.items() if slot < len(self._assigned[s])]
        ):
            self._assign_slot()
        return min(known)[1]

    def _assign_slot(self) -> None:
        """Assign the next slot to a prompt source, in exact integer arithmetic."""
        scale, period, number = max(2 * len(self._weights) - 2, 1), sum(self._weights), sum(map(len, self._assigned))

        def behind(source: int) -> int:
            """Return the latest slot that the source can get without falling too far behind its share."""
            return ((len(self._assigned[source]) + 1) * scale - 1) * period // (scale * self._weights[source])

        due = [
            source
            for source, weight in enumerate(self._weights)
            if scale * (weight * (number + 1) - period * len(self._assigned[source])) >= period
        ]
        self._assigned[min(due, key=behind)].append(number)


def _reduce_shares(shares: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest integers that have the same ratio as `shares`."""
    exact = [Fraction(str(share)) for share in shares]
    scaled = [int(share * math.lcm(*(e.denominator for e in exact))) for share in exact]
    return tuple(weight // math.gcd(*scaled) for weight in scaled)
