"""Checks a run's log against anchors: hashes of log entries that are stored where a person who alters the run cannot
write.

    12:6b86b273...   entry 12 has this sha256

Each entry names the hash of the previous entry, so the anchor of an entry also proves all earlier entries. The log is
append-only, so an anchor stays valid as the run continues. If `rollflow audit --repair` moved a log entry away, the
check also reports the anchor of that entry.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rollflow.storage.audit.report import Violation
from rollflow.storage.errors import ConfigError, Corrupt, Missing
from rollflow.storage.log.entries import entry_path
from rollflow.storage.log.state import RunState
from rollflow.storage.objects.base import ObjectStore

FORM = re.compile(r"(\d{1,10}):([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Anchor:
    """An anchor: the number `n` of a log entry, and the entry's sha256."""

    n: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.n}:{self.sha256}"


def parse_anchor(text: str) -> Anchor:
    """Parse an anchor: the number and the hash of a log entry, written as `N:SHA256`.

    Raises:
        ConfigError: the text does not have the form `N:SHA256`.
    """
    if (match := FORM.fullmatch(text.strip())) is None:
        raise ConfigError(
            f"the anchor {text!r} is not of the form N:SHA256; give the number and the sha256 of a log entry, "
            "e.g. 0:6b86b273..."
        )
    return Anchor(int(match[1]), match[2])


def first_anchor(run: ObjectStore) -> Anchor:
    """Return the anchor (number and hash) of log entry 0."""
    return Anchor(0, hashlib.sha256(run.get(entry_path(0))).hexdigest())


def newest_anchor(state: RunState) -> Anchor:
    """Return the anchor (number and hash) of the newest log entry in a run's state."""
    return Anchor(state.n, state.sha256)


def check_anchors(run: ObjectStore, anchors: Sequence[Anchor]) -> list[Violation]:
    """Report the log entries whose hash differs from the hash that an anchor names."""
    found = []
    for anchor in anchors:
        path = entry_path(anchor.n)
        try:
            sha256 = hashlib.sha256(run.get(path)).hexdigest()
        except Missing:
            found.append(
                Violation(
                    "gap", path, f"the log has no entry {anchor.n}, but an anchor names its hash {anchor.sha256[:12]}"
                )
            )
        except Corrupt as error:
            found.append(Violation("altered", path, f"{error}; an anchor names the entry's hash {anchor.sha256[:12]}"))
        else:
            if sha256 != anchor.sha256:
                what = f"the entry has sha256 {sha256[:12]}, and its anchor is {anchor.sha256[:12]}"
                found.append(
                    Violation("altered", path, f"{what}: the log was rewritten or repaired after the anchor was taken")
                )
    return found
