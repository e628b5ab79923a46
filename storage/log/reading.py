"""Reads a long range of log entries by number, several entries at a time.

    for n, found in read_entries(run, first): ...        bytes, `LogGap` (missing entries from n on) or `Corrupt`
    for entry in iterate_written(log, first, last): ...  parsed entries of an open log

`read_entries` is for audit and garbage collection: it yields the stored bytes, parses nothing and reads no snapshot.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.log.entries import FOLDER, WrittenEntry, entry_number, entry_path
from rollflow.storage.log.run_log import AHEAD, Log
from rollflow.storage.objects.base import ObjectStore

# largest number of parallel reads of log entries; it starts at two, so that few reads go beyond the end of a short log
AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class LogGap:
    """A gap in a log: the log entries from `first` to `end - 1` are missing, although log entry `end` exists."""

    first: int
    end: int

    def __str__(self) -> str:
        last = f" to {entry_path(self.end - 1)}" if self.end - self.first > 1 else ""
        return f"{entry_path(self.first)}{last} is missing, but {entry_path(self.end)} exists"


def read_entries(
    run: ObjectStore, first: int = 0, *, to_the_last: bool = False
) -> Iterator[tuple[int, bytes | LogGap | Corrupt]]:
    """Yield the number and the bytes of each log entry from `first` on; gaps in the log and read errors are also
    yielded.

    Args:
        to_the_last: if true, the log's folder is listed to find the last log entry, which may take a long time. If
            `to_the_last` is false, on a local disk only the next `AHEAD` entry numbers are looked up, and a longer gap
            counts as the end of the log.
    """
    pool = ThreadPoolExecutor(AT_ONCE, "log")
    ahead: deque[Future[bytes | Missing | Corrupt]] = deque()
    n, wide = first, 2
    try:
        while True:
            while len(ahead) < wide:
                ahead.append(pool.submit(_read, run, n + len(ahead)))
            found: bytes | Missing | Corrupt | LogGap = ahead.popleft().result()
            if isinstance(found, Missing):
                behind = next_number(run, n, to_the_last=to_the_last)
                if behind is None:
                    return
                found = _read(run, n)  # read again, because the log entry may have been written since the first read
                if isinstance(found, Missing):
                    found = LogGap(n, behind)
                    ahead.clear()
            yield n, found
            n = found.end if isinstance(found, LogGap) else n + 1
            wide = min(AT_ONCE, wide + 1)
    finally:
        pool.shutdown(cancel_futures=True)


def iterate_written(log: Log, first: int, last: int) -> Iterator[WrittenEntry]:
    """Yield the parsed log entries from `first` to `last`; the log must have read these entries before.

    Raises:
        Corrupt: a log entry is missing or damaged, and no segment has an intact copy of the entry.
    """
    pool = ThreadPoolExecutor(AT_ONCE, "log")
    try:
        for start in range(first, last + 1, AT_ONCE):
            numbers = range(start, min(start + AT_ONCE, last + 1))
            yield from pool.map(lambda n: get_entry(log, n), numbers)
    finally:
        pool.shutdown(cancel_futures=True)


def get_entry(log: Log, n: int) -> WrittenEntry:
    """Read log entry `n` again; the log must have read this entry before.

    Raises:
        Corrupt: the log entry is missing or damaged, and no segment has an intact copy of the entry.
    """
    found = log.read(n)
    assert found is not None  # the log has read this entry before, so the entry exists
    return found


def next_number(run: ObjectStore, n: int, *, to_the_last: bool) -> int | None:
    """Return the number of the first log entry that exists after log entry `n`; return None if there is none. For the
    argument `to_the_last`, see `read_entries`.
    """
    local = run.local_path(FOLDER)
    if local is not None and not to_the_last:
        return next((m for m in range(n + 1, n + AHEAD) if run.exists(entry_path(m))), None)
    if local is not None:  # the folder is read directly, because the store's `list` would first sort all names
        own = (entry_number(f"{FOLDER}/{name}") for name in (os.listdir(local) if local.exists() else ()))
        return min((number for number in own if number is not None and number > n), default=None)
    numbers = map(entry_number, run.list(FOLDER, after=entry_path(n)))
    return next((number for number in numbers if number is not None), None)


def _read(run: ObjectStore, n: int) -> bytes | Missing | Corrupt:
    try:
        return run.get(entry_path(n))
    except (Missing, Corrupt) as error:
        return error
