"""What an audit stores: where it ended, so that the next one reads only what is new. It decides nothing.

    audits/<n>.json     sealed: the state after entry n, what was counted up to there, the rows of waiting batches

Only an audit that found nothing wrong stores one. A deep audit that found something removes those that are there, so
that what was wrong once is looked at again. The next audit begins with the newest one whose entry n is unchanged. If
its entry n is another one, or gone, that proves that the log was written anew, or cut. Snapshots prove the same,
because their names hold the hash of their entry.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass, field, replace

from pydantic import TypeAdapter

from rollflow.storage.errors import Corrupt, Missing, RollflowError
from rollflow.storage.log.entries import entry_path, opened, sealed
from rollflow.storage.log.report import AuditReport, Rows
from rollflow.storage.log.snapshots import NAME, SNAPSHOTS, from_bytes
from rollflow.storage.log.state import FOLD, RunState
from rollflow.storage.objects.base import ObjectStore

AUDITS = "audits"
RULES = 2  # raised with any change of what an audit checks: then everything is checked again
KEPT = 3

UNREADABLE = (Missing, Corrupt, ValueError, KeyError)  # a validation's error is a ValueError


@dataclass(slots=True)
class Audited:
    """How far an audit came."""

    state: RunState = field(default_factory=RunState)
    report: AuditReport = field(default_factory=AuditReport)
    rows: dict[int, Rows] = field(default_factory=dict)  # entry of a batch that waits -> its rows
    responses: int = 0  # that are started for a group
    first: str = ""  # the hash of entry 0
    opened: dict[int, int] = field(default_factory=dict)  # open prompt -> the batch with which its dispatch began
    thorough: bool = False  # prompts and config were compared, too


@dataclass(frozen=True, slots=True)
class Witness:
    """An object that was made from the log when the hash of entry `n` was this, or began with it."""

    path: str
    n: int
    sha256: str


def audit_path(n: int) -> str:
    """Where the audit lies that ended with entry `n`."""
    return f"{AUDITS}/{n:010d}.json"


def keep(run: ObjectStore, audited: Audited) -> None:
    """Write down how far an audit came, and remove old ones. A failure costs the next audit some time."""
    tree = {"rules": RULES, "fold": FOLD, "audited": _AUDITED.dump_python(audited, mode="json")}
    with contextlib.suppress(RollflowError, OSError):
        run.put(audit_path(audited.state.n), sealed(tree))
        for old in sorted(run.list(AUDITS))[:-KEPT]:
            run.delete(old)


def withdraw(run: ObjectStore, others: list[Witness]) -> None:
    """Remove the audits that vouch for what was found wrong. Those that saw another log stay, as witnesses."""
    with contextlib.suppress(RollflowError, OSError):
        for path in set(run.list(AUDITS)) - {other.path for other in others}:
            run.delete(path)


def newest(run: ObjectStore, *, thorough: bool = False) -> tuple[Audited, list[Witness]]:
    """Return the newest audit that can be trusted (an empty one if none can), and those that saw another log.

    Args:
        thorough: only one that compared prompts and config.
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
    return Audited(), others


def snapshots(run: ObjectStore) -> list[Witness]:
    """What the names of the snapshots say."""
    names = [name for path in run.list(SNAPSHOTS) if (name := NAME.fullmatch(path))]
    return [Witness(name[0], int(name[1]), name[2]) for name in names]


def is_sound(run: ObjectStore, witness: Witness) -> bool:
    """Whether a witness is undamaged; one that cannot be read proves nothing."""
    if not witness.path.startswith(SNAPSHOTS):
        return True  # it was read
    try:
        state = from_bytes(run.get(witness.path))
    except UNREADABLE:
        return False
    return state.n == witness.n and state.sha256.startswith(witness.sha256)


def _read(run: ObjectStore, path: str) -> Audited:
    tree = opened(run.get(path))
    audited = _AUDITED.validate_python(tree["audited"])
    if (tree["rules"], tree["fold"], path) != (RULES, FOLD, audit_path(audited.state.n)):
        raise ValueError(f"{path} is of another version, or another audit")
    return replace(audited, report=replace(audited.report, bytes=0))


def _holds(run: ObjectStore, witness: Witness) -> bool:
    try:
        return hashlib.sha256(run.get(entry_path(witness.n))).hexdigest() == witness.sha256
    except (Missing, Corrupt):
        return False


_AUDITED: TypeAdapter[Audited] = TypeAdapter(Audited)
