"""Rereads log entry 0 and the newest log entries that an earlier audit has read. An audit that continues from an
earlier result must check that the log still matches the earlier result.
"""

from __future__ import annotations

import hashlib

from rollflow.storage.audit.checkpoints import AuditCheckpoint, audit_path
from rollflow.storage.audit.report import Violation, ViolationKind
from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.log.entries import decode, entry_path, open_sealed
from rollflow.storage.log.rules import apply
from rollflow.storage.log.state import EntryRefused, RunState
from rollflow.storage.objects.base import ObjectStore

NEWEST = 8  # number of newest log entries that are read again


def recheck(run: ObjectStore, begun: AuditCheckpoint) -> list[Violation]:
    """Report whether log entry 0, or the last log entries that the earlier audit `begun` read, have changed since that
    audit."""
    return [*_recheck_first(run, begun), *_recheck_newest(run, begun)]


def _recheck_first(run: ObjectStore, begun: AuditCheckpoint) -> list[Violation]:
    path = entry_path(0)
    try:
        data = run.get(path)
        written = decode(data, 0, run.get)
        first = apply(RunState(), written)
    except (Missing, Corrupt, EntryRefused, KeyError, TypeError, ValueError) as error:
        return [Violation("altered", path, f"the first entry can no longer be read: {error}")]
    if written.sha256 != begun.first:
        return [Violation("altered", path, f"{audit_path(begun.state.n)} was made from an entry 0 with another hash")]
    rules = ["run_id", "fixed", *(["alpha", "group_size", "retention"] if len(begun.state.configs) == 1 else [])]
    if any(getattr(first, name) != getattr(begun.state, name) for name in rules):
        return [
            Violation(
                "altered",
                audit_path(begun.state.n),
                "the rules of the run in this record of an audit differ from the rules in entry 0",
            )
        ]
    return []


def _recheck_newest(run: ObjectStore, begun: AuditCheckpoint) -> list[Violation]:
    """Follow the hash chain back from the last log entry that the earlier audit `begun` read, and check the link to log
    entry 0."""
    end = begun.state.n
    found: list[Violation] = []
    named: dict[int, str] = {}  # maps the number of a log entry to the hash that the next entry names for it
    numbers = [*range(end, max(end - NEWEST, 0), -1), *([1] if end > NEWEST else [])]
    for n in numbers:
        try:
            data = run.get(entry_path(n))
            prev = open_sealed(data)["prev"]
        except (Missing, Corrupt, ValueError, KeyError) as error:
            kind: ViolationKind = "gap" if isinstance(error, Missing) else "altered"
            found.append(
                Violation(
                    kind, entry_path(n), f"an earlier audit read this entry, which can no longer be read: {error}"
                )
            )
            continue
        if n in named and hashlib.sha256(data).hexdigest() != named[n]:
            found.append(Violation("altered", entry_path(n), f"entry {n + 1} names another hash for this entry"))
        named[n - 1] = prev
    if 0 in named and named[0] != begun.first:
        found.append(Violation("altered", entry_path(0), "entry 1 names another hash for entry 0"))
    return found
