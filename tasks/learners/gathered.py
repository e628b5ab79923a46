"""Files that are put together from parts on several ranks when they are asked for: whoever stores them holds few."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from rollflow.storage.objects.base import Data
from rollflow.storage.policies import MOVERS

GATHERED = 2  # files that are moved at a time: one is gathered while another is written


class Gathered(Mapping[str, Data]):
    """Files by name, gathered one at a time whoever asks, and not kept. As long as what they are of does not change."""

    def __init__(self, names: Iterable[str], gather: Callable[[str], Data]) -> None:
        self._names, self._gather, self._turn = tuple(names), gather, threading.Lock()

    def __getitem__(self, name: str) -> Data:
        if name not in self._names:
            raise KeyError(name)
        with self._turn:
            return self._gather(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def movers(files: Mapping[str, Data]) -> int:
    """How many of them to move at a time: each that is gathered takes memory until it is stored."""
    return GATHERED if isinstance(files, Gathered) else MOVERS
