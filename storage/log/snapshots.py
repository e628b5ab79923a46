"""Writes snapshots and segments of a run's log. A snapshot contains the run's state, so that the log can be opened
fast. A segment contains copies of log entries, from which damaged entries are restored.

    log_snapshots/<n>-<hash of entry n>.json     the state after entry n, with a checksum
    log_segments/<first>.jsonl                   EVERY entries from `first` on, verbatim

Snapshots and segments are written in the background after every EVERY-th entry, by the process that appended the entry.
If they are missing, the next process that opens the log writes them. A snapshot that cannot be read, or that was
written under another version of the log's rules, is ignored. Only the newest snapshots are kept. No decision of a run
depends on snapshots or segments.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from itertools import takewhile

from pydantic import TypeAdapter, ValidationError

from rollflow.storage.errors import Corrupt, Missing, RollflowError
from rollflow.storage.log.entries import entry_path, open_sealed, seal_tree
from rollflow.storage.log.state import FOLD, RunState
from rollflow.storage.objects.base import ObjectStore

EVERY = 64  # number of log entries between two snapshots of the run's state
KEPT = 3  # the number of newest snapshots of the run's state that are kept
SNAPSHOTS, SEGMENTS = "log_snapshots", "log_segments"
NAME = re.compile(rf"{SNAPSHOTS}/(\d{{10}})-([0-9a-f]{{16}})\.json")


def is_due(n: int) -> bool:
    """Return whether a snapshot of the run's state is written after log entry `n`."""
    return n % EVERY == EVERY - 1


def snapshot_path(n: int, sha256: str) -> str:
    """Return the path of the snapshot of the run's state after log entry `n`."""
    return f"{SNAPSHOTS}/{n:010d}-{sha256[:16]}.json"


def segment_path(n: int) -> str:
    """Return the path of the segment that contains a copy of log entry `n`."""
    return f"{SEGMENTS}/{n - n % EVERY:010d}.jsonl"


def to_bytes(state: RunState) -> bytes:
    """Encode a run's state as a snapshot, which ends with a checksum."""
    return seal_tree({"fold": FOLD, "state": _STATE.dump_python(state, mode="json")})


def from_bytes(data: bytes) -> RunState:
    """Decode a snapshot of a run's state; raise `ValueError` if this release of rollflow cannot read the snapshot."""
    tree = open_sealed(data)
    if tree.get("fold") != FOLD:
        raise ValueError(
            "the snapshot of the log's state cannot be used, because another version of the log's rules made it"
        )
    return _STATE.validate_python(tree["state"])


def newest_snapshot(run: ObjectStore) -> RunState:
    """Return the run's state in the newest valid snapshot; if there is no valid snapshot, return the state of an empty
    log.

    A snapshot is valid if the log still contains the log entry after which the snapshot was taken, with the same hash.
    """
    for path in sorted(run.list(SNAPSHOTS), reverse=True):
        if (name := NAME.fullmatch(path)) is None:
            continue
        with contextlib.suppress(Missing, Corrupt, ValueError, KeyError, TypeError, ValidationError):
            state = from_bytes(run.get(path))
            found = hashlib.sha256(run.get(entry_path(state.n))).hexdigest()
            if (state.n, state.sha256) == (int(name[1]), found):
                return state
    return RunState()


def keep_snapshot(run: ObjectStore, state: RunState) -> None:
    """Write a snapshot of a run's state, and remove old snapshots. Errors of writing a snapshot are ignored, because a
    missing snapshot only makes a later start slower.
    """
    with contextlib.suppress(RollflowError, OSError):
        run.put(snapshot_path(state.n, state.sha256), to_bytes(state))
        for old in sorted(run.list(SNAPSHOTS))[:-KEPT]:
            run.delete(old)


def keep_segments(run: ObjectStore, n: int) -> None:
    """Write the segment (a file with copies of log entries) that ends with log entry `n`, and earlier segments that are
    missing."""
    with contextlib.suppress(RollflowError, OSError):
        missing = list(takewhile(lambda last: not run.exists(segment_path(last)), range(n, -1, -EVERY)))
        for last in reversed(missing):
            _write_segment(run, last)


def _write_segment(run: ObjectStore, last: int) -> None:
    with contextlib.suppress(RollflowError, OSError):
        run.put(segment_path(last), b"\n".join(run.get(entry_path(m)) for m in range(last + 1 - EVERY, last + 1)))


def restore_segment(run: ObjectStore, first: int, end: int) -> list[bytes] | None:
    """Read copies of the log entries from `first` to `end - 1`; return None if their hash chain does not lead to entry
    `end`.
    """
    found: list[bytes] = []
    with contextlib.suppress(Missing, Corrupt, ValueError, KeyError):
        prev = open_sealed(run.get(entry_path(end)))["prev"]
        for n in reversed(range(first, end)):
            data = from_segment(run, n)
            if hashlib.sha256(data).hexdigest() != prev:
                return None
            found.append(data)
            prev = open_sealed(data)["prev"]
        return found[::-1]
    return None


def from_segment(run: ObjectStore, n: int) -> bytes:
    """Read the copy of log entry `n` in a segment; raise `Missing` if no segment has a copy of the entry."""
    lines = run.get(segment_path(n)).split(b"\n")
    if len(lines) != EVERY:
        raise Missing(f"the log segment {segment_path(n)} is truncated, so entries are missing")
    return lines[n % EVERY]


_STATE: TypeAdapter[RunState] = TypeAdapter(RunState)
