"""Mixing prompt sources: which one the next prompt comes from, so that what is trained holds the configured shares.

The shares give an endless order of *slots*, each of one source. The groups of a source that were issued and not
filtered fill its slots in their order, and the next prompt always fills the first slot that is free:

    slots         a a b a | a a b a | a ...
    issued        a0 a1 b0 a2 ...        a1 is filtered: one more `a` comes before b1

- From the beginning up to any point, each source has its share to within one group. So have the groups that a filter
  keeps, once the slots that it freed are filled again. A source with more filtered groups is issued more; it never
  trains less.
- Nobody waits for a slow source: its groups count from when they are issued.
- The choice follows from the counts in a `Cursor` alone. So a scheduler that begins at a commit goes on like the one
  that made it. Which prompts fill the first n slots depends on which groups are filtered, not on the order in which
  they are. That keeps a run at alpha = 0 reproducible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from rollflow.storage.records import Cursor


class Mixture:
    """Chooses the next prompt of D sources (with one source, it only counts). See the module's docstring for the
    guarantees.
    """

    def __init__(self, shares: Sequence[float], issued: Sequence[int] = (), filtered: Sequence[int] = ()) -> None:
        """Go on from a cursor's counts, by source; without them, begin."""
        self._slots = Slots(shares)
        self._issued = list(issued) or [0] * len(shares)
        self._filtered = list(filtered) or [0] * len(shares)
        if not len(shares) == len(self._issued) == len(self._filtered):
            raise ValueError(f"{len(shares)} sources cannot go on from a cursor of {len(issued)}")

    @property
    def state(self) -> Cursor:
        """What to commit."""
        return Cursor(tuple(self._issued), tuple(self._filtered))

    def next(self) -> int:
        """The index of the next prompt, which counts as issued from now on."""
        kept = [issued - gone for issued, gone in zip(self._issued, self._filtered, strict=True)]
        source = self._slots.first_free(kept)
        self._issued[source] += 1
        return (self._issued[source] - 1) * len(self._issued) + source

    def filtered(self, index: int) -> None:
        """The group of this prompt was filtered for good: its source gets another one in its place."""
        self._filtered[index % len(self._filtered)] += 1


class Slots:
    """The order of slots by the shares: of the first n slots, source s has n * share(s), to within one.

    Slot n goes to the source that would fall behind first, of those that it would not put ahead: Tijdeman's solution of
    the chairman assignment problem (Discrete Mathematics 32, 1980), whose error is at most 1 - 1 / (2D - 2) and so
    never reaches 1. Shares are taken as the decimal fractions a person wrote, so the order repeats exactly, with a
    period in which each source has a whole number of slots.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self._weights = _whole(shares)  # slots of each source in a period
        self._laid: list[list[int]] = [[] for _ in shares]  # source -> where its slots are in a period, as far as known

    def first_free(self, filled: Sequence[int]) -> int:
        """The source of the first free slot, when each source has filled so many of its own."""
        periods = [count // weight for count, weight in zip(filled, self._weights, strict=True)]
        first = min(periods)
        free = {s: filled[s] - first * self._weights[s] for s, period in enumerate(periods) if period == first}
        while not (known := [(self._laid[s][slot], s) for s, slot in free.items() if slot < len(self._laid[s])]):
            self._lay()
        return min(known)[1]

    def _lay(self) -> None:
        """Find the source of the next slot of a period, in whole numbers."""
        scale, period, number = max(2 * len(self._weights) - 2, 1), sum(self._weights), sum(map(len, self._laid))

        def behind(source: int) -> int:
            """The last number of slots at which the source is not too far behind without one more."""
            return ((len(self._laid[source]) + 1) * scale - 1) * period // (scale * self._weights[source])

        due = [
            source
            for source, weight in enumerate(self._weights)
            if scale * (weight * (number + 1) - period * len(self._laid[source])) >= period
        ]
        self._laid[min(due, key=behind)].append(number)


def _whole(shares: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the ratio of `shares`."""
    exact = [Fraction(str(share)) for share in shares]
    scaled = [int(share * math.lcm(*(e.denominator for e in exact))) for share in exact]
    return tuple(weight // math.gcd(*scaled) for weight in scaled)
