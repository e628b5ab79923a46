"""A store that counts writes and can fail; and a function that makes logs that consist of claims."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from rollflow.storage.log.run_log import Log
from rollflow.storage.objects.base import Data, ObjectStore
from rollflow.storage.objects.memory import MemoryStore
from tests.support.log_actors import create_run


class Counting(MemoryStore):
    """A store that counts its writes by folder. A write to a path that begins with a key of `broken` fails with an
    error of this key.
    """

    writes: ClassVar[Counter[str]] = Counter()
    broken: ClassVar[dict[str, list[Exception]]] = {}

    def create(self, path: str, data: Data) -> None:
        self.count(path)
        super().create(path, data)

    def put(self, path: str, data: Data) -> str:
        self.count(path)
        return super().put(path, data)

    def count(self, path: str) -> None:
        folder = path.partition("/")[0]
        self.writes[folder] += 1
        if self.broken.get(folder):
            raise self.broken[folder].pop(0)


def claims(store: ObjectStore, count: int) -> Log:
    """Make a log of `count` entries, which are all claims except entry 0."""
    create_run(store)
    log = Log(store)
    for number in range(1, count):
        log.claim("supervisor", who=f"supervisor {number}")
    log.settle()
    return log
