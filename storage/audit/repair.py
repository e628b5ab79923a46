"""Repairs a damaged log: `plan_repairs` lists the steps, and `repair` carries out the steps that the user accepts. No
process may use the run during a repair.

A damaged log entry is restored from a segment, which is a file with copies of log entries. The newest entry has no
copy, so it is moved away, and the run repeats the entry's work. If another damaged entry has no copy, the log cannot be
repaired.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from rollflow.storage.audit.checkpoints import AUDITS
from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.log.entries import FOLDER, WrittenEntry, decode, entry_number, entry_path
from rollflow.storage.log.rules import apply
from rollflow.storage.log.snapshots import SNAPSHOTS, restore_segment
from rollflow.storage.log.state import EntryRefused, RunState
from rollflow.storage.objects.base import ObjectStore

ASIDE = "log_damaged"


@dataclass(frozen=True, slots=True)
class LogRepair:
    """One step of a log's repair: restore log entry `n` from `data`, or move the log entry away if `data` is None."""

    n: int
    what: str  # a description of the damage
    data: bytes | None = None

    def __str__(self) -> str:
        if self.data is not None:
            return f"{self.what}: restore the entry from its segment"
        lost = "the change that the entry committed is lost, and the run will make it again"
        return f"{self.what}: move the entry away, so that the log ends with entry {self.n - 1}; {lost}"


def plan_repairs(run: ObjectStore) -> list[LogRepair]:
    """List the steps that would repair a damaged log; return an empty list if the log is intact.

    Raises:
        Missing: the storage contains no log.
        Corrupt: the log is damaged in a way that cannot be repaired.
    """
    numbers = sorted(n for path in run.list(FOLDER) if (n := entry_number(path)) is not None)
    if not numbers:
        raise Missing(f"there is no log of a run in {run.uri}; check the path or URI of the run")
    last = numbers[-1]
    found: list[LogRepair] = []
    state = RunState()
    for n in range(last + 1):
        written, cure = _entry(run, n, numbers)
        found += [cure] if cure else []
        if written is None:
            break
        try:
            state = apply(state, written)
        except EntryRefused as error:
            what = f"{entry_path(n)} is refused by the log's rules ({error})"
            if n < last:
                raise Corrupt(f"the log cannot be repaired: {what}, and {_count_following(n, numbers)}") from error
            found.append(LogRepair(n, what))
    return found


def repair(run: ObjectStore, agreed: Sequence[LogRepair]) -> None:
    """Carry out the steps of a log's repair that the user accepted."""
    for cure in agreed:
        path = entry_path(cure.n)
        if cure.data is not None:
            run.put(path, cure.data)
        else:
            run.put(f"{ASIDE}/{cure.n:010d}.json", run.get(path))
            for later in _made_of(run, cure.n):
                run.delete(later)
            run.delete(path)


def _made_of(run: ObjectStore, n: int) -> list[str]:
    """List the snapshots and audit results made at or after log entry `n`, which would show that the log was
    truncated."""
    found = (path for folder in (SNAPSHOTS, AUDITS) for path in run.list(folder))
    return [path for path in found if int(path.rpartition("/")[2][:10]) >= n]


def _count_following(n: int, numbers: Sequence[int]) -> str:
    """Return a text that says how many log entries follow log entry `n`."""
    count = len(numbers) - bisect_right(numbers, n)
    return f"{count} entries follow it" if count > 1 else f"entry {numbers[-1]} follows it"


def _entry(run: ObjectStore, n: int, numbers: Sequence[int]) -> tuple[WrittenEntry | None, LogRepair | None]:
    """Read log entry `n`; return the entry (None if it must be moved away), and the step that repairs the entry, if
    any."""
    try:
        return decode(run.get(entry_path(n)), n, run.get), None
    except Missing:
        what = f"{entry_path(n)} is missing"
    except Corrupt as error:
        what = str(error)
    if n == numbers[-1]:
        return None, LogRepair(n, what)
    found = restore_segment(run, n, n + 1)
    if found is None:
        raise Corrupt(
            f"the log cannot be repaired: {what}, no segment contains a copy of this entry, and "
            f"{_count_following(n, numbers)}"
        )
    return decode(found[0], n, run.get), LogRepair(n, what, found[0])
