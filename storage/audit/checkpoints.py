"""Stores the results of audits. An audit of a run begins where the newest stored audit ended, and reads only the newer
log entries.

    audits/<n>.json     the state after entry n, the counts up to there, the rows of waiting batches, and a checksum

Only an audit without violations stores a result. A deep audit with violations removes the stored results, so that the
next audit checks the whole log again. An audit begins with the newest result whose entry n is unchanged. If entry n of
a result has another hash or is missing, the log was rewritten or truncated. A snapshot can prove the same, because the
name of a snapshot contains the hash of an entry. No decision of a run depends on stored results of audits.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass, field, replace

from pydantic import TypeAdapter

from rollflow.storage.audit.report import AuditReport, RowCounts
from rollflow.storage.errors import Corrupt, Missing, RollflowError
from rollflow.storage.log.entries import entry_path, open_sealed, seal_tree
from rollflow.storage.log.snapshots import NAME, SNAPSHOTS, from_bytes
from rollflow.storage.log.state import FOLD, RunState
from rollflow.storage.objects.base import ObjectStore

AUDITS = "audits"
RULES = 2  # version number of the audit's checks; audit results that were stored with another number are not used
KEPT = 3

UNREADABLE = (Missing, Corrupt, ValueError, KeyError)  # pydantic's ValidationError is a ValueError


@dataclass(slots=True)
class AuditCheckpoint:
    """The state of an audit after the last log entry that the audit read."""

    state: RunState = field(default_factory=RunState)
    report: AuditReport = field(default_factory=AuditReport)
    # row counts of batches that were not trained on yet, by the batch's log entry
    rows: dict[int, RowCounts] = field(default_factory=dict)
    responses: int = 0  # the number of responses that are started for each prompt
    first: str = ""  # the hash of log entry 0
    # maps a prompt in flight to the number of the batch with which the prompt was issued
    opened: dict[int, int] = field(default_factory=dict)
    thorough: bool = False  # true: the audit compared batches with prompts and with the config's limits


@dataclass(frozen=True, slots=True)
class Witness:
    """A stored object that proves which hash a log entry had when the object was written. The field `sha256` may
    contain only the beginning of the hash.
    """

    path: str
    n: int
    sha256: str


def audit_path(n: int) -> str:
    """Return the path of the stored result of the audit that ended with log entry `n`."""
    return f"{AUDITS}/{n:010d}.json"


def keep(run: ObjectStore, audited: AuditCheckpoint) -> None:
    """Store the result of an audit, and remove the results of older audits. A failed write of the result is ignored,
    because it only makes the next audit slower.
    """
    tree = {"rules": RULES, "fold": FOLD, "audited": _AUDITED.dump_python(audited, mode="json")}
    with contextlib.suppress(RollflowError, OSError):
        run.put(audit_path(audited.state.n), seal_tree(tree))
        for old in sorted(run.list(AUDITS))[:-KEPT]:
            run.delete(old)


def withdraw(run: ObjectStore, others: list[Witness]) -> None:
    """Remove the stored results of audits, so that the next audit checks the whole log. The audit results in `others`
    are not removed, because these results prove that the log was altered.
    """
    with contextlib.suppress(RollflowError, OSError):
        for path in set(run.list(AUDITS)) - {other.path for other in others}:
            run.delete(path)


def find_newest(run: ObjectStore, *, thorough: bool = False) -> tuple[AuditCheckpoint, list[Witness]]:
    """Return the newest audit result that matches the log (an empty result if none does), and the results that do not
    match.

    Args:
        thorough: if true, accept only the result of an audit that compared batches with prompts and limits.
    """
    others: list[Witness] = []
    for path in sorted(run.list(AUDITS), reverse=True):
        try:
            audited = _read(run, path)
        except UNREADABLE:
            continue
        witness = Witness(path, audited.state.n, audited.state.sha256)
        if not _holds(run, witness):
            others.append(witness)
        elif audited.thorough or not thorough:
            return audited, others
    return AuditCheckpoint(), others


def list_snapshots(run: ObjectStore) -> list[Witness]:
    """Return a `Witness` for each snapshot of the log; a snapshot's name contains the beginning of a log entry's
    hash."""
    names = [name for path in run.list(SNAPSHOTS) if (name := NAME.fullmatch(path))]
    return [Witness(name[0], int(name[1]), name[2]) for name in names]


def is_sound(run: ObjectStore, witness: Witness) -> bool:
    """Return whether the stored object of a `Witness` is undamaged; a damaged object proves nothing about the log."""
    if not witness.path.startswith(SNAPSHOTS):
        return True  # the function `find_newest` has already read and parsed the result of this audit
    try:
        state = from_bytes(run.get(witness.path))
    except UNREADABLE:
        return False
    return state.n == witness.n and state.sha256.startswith(witness.sha256)


def _read(run: ObjectStore, path: str) -> AuditCheckpoint:
    tree = open_sealed(run.get(path))
    audited = _AUDITED.validate_python(tree["audited"])
    if (tree["rules"], tree["fold"], path) != (RULES, FOLD, audit_path(audited.state.n)):
        raise ValueError(
            f"{path} cannot be used: it was made by another version of the audit, or for another log entry"
        )
    return replace(audited, report=replace(audited.report, bytes=0))


def _holds(run: ObjectStore, witness: Witness) -> bool:
    try:
        return hashlib.sha256(run.get(entry_path(witness.n))).hexdigest() == witness.sha256
    except (Missing, Corrupt):
        return False


_AUDITED: TypeAdapter[AuditCheckpoint] = TypeAdapter(AuditCheckpoint)
