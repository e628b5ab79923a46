"""Tests of the log entries that an audit checks again although an earlier audit has read them: entry 0, the newest
entries and stray entries.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rollflow.storage.audit import checkpoints, recheck
from rollflow.storage.audit.anchors import Anchor, check_anchors, first_anchor, newest_anchor, parse_anchor
from rollflow.storage.audit.audit import audit
from rollflow.storage.errors import ConfigError
from rollflow.storage.log.entries import encode, entry_path
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.objects.memory import MemoryStore
from tests.support.audited import other_alpha
from tests.support.log_runs import Actors, changed, read, resealed, sha256_of


@pytest.fixture
def audited(store: MemoryStore) -> MemoryStore:
    """Return a run that was audited to its end, with only the audit's stored result left."""
    Actors.begin(store).train(8)
    assert audit(store).clean
    for folder in ("log_snapshots", "log_segments"):
        for path in list(store.list(folder)):
            store.delete(path)
    return store


def whole(body: object, alpha: float) -> object:
    """Return entry 0 with another alpha and the hash of that config."""
    other = other_alpha(body, alpha)  # type: ignore[arg-type]
    return replace(other, config_sha256=sha256_of(other.config))


def test_audit_finds_an_altered_alpha_in_the_first_log_entry(audited: MemoryStore) -> None:
    """The forged entry has valid hashes of its content, and the rest of the hash chain is unchanged."""
    resealed(audited, 0, body=whole(read(audited)[0].body, 99.0))
    report = audit(audited)
    assert report.since == len(read(audited))
    assert ("altered", entry_path(0)) in {(v.kind, v.where) for v in report.violations}


def test_audit_finds_an_altered_alpha_despite_an_old_audit(audited: MemoryStore) -> None:
    """The stored result of the earlier audit also has the altered alpha, but entry 1 still names the hash of the
    original entry 0.
    """
    resealed(audited, 0, body=whole(read(audited)[0].body, 99.0))
    found, _ = checkpoints.find_newest(audited)
    first = first_anchor(audited).sha256
    checkpoints.keep(audited, replace(found, first=first))
    assert {v.where for v in audit(audited).violations} == {entry_path(0), checkpoints.audit_path(found.state.n)}
    rules = {"alpha": 99.0, "retention": replace(found.state.retention, keep_last=100)}
    checkpoints.keep(audited, replace(found, first=first, state=replace(found.state, **rules)))
    assert {v.where for v in audit(audited).violations} == {entry_path(0)}


@pytest.mark.parametrize("back", range(1, recheck.NEWEST))
@pytest.mark.parametrize("how", ["altered", "gone", "damaged"])
def test_audit_checks_the_newest_log_entries_again(audited: MemoryStore, back: int, how: str) -> None:
    n = len(read(audited)) - 1 - back
    if how == "altered":
        resealed(audited, n, at=1.0)
    elif how == "gone":
        audited.delete(entry_path(n))
    else:
        audited.put(entry_path(n), b"{}")
    kind = "gap" if how == "gone" else "altered"
    assert (kind, entry_path(n)) in {(v.kind, v.where) for v in audit(audited).violations}


def test_second_audit_of_an_intact_log_finds_no_violation(audited: MemoryStore) -> None:
    before = list(audited.list("audits"))
    assert audit(audited).clean
    assert list(audited.list("audits")) == before


def test_audit_checks_all_entries_of_a_short_log_again(store: MemoryStore) -> None:
    Actors.begin(store)
    assert audit(store).clean
    assert audit(store).clean


def test_audit_finds_a_log_entry_after_a_gap(tmp_path: Path) -> None:
    """The number of the stray entry is far beyond the end of the log, where readers do not look."""
    store = LocalStore(tmp_path)
    Actors.begin(store).train(2)
    assert audit(store).clean
    end = len(read(store))
    store.put(entry_path(5_000), store.get(entry_path(2)))
    assert {v.where for v in audit(store).violations} >= {entry_path(end)}


# --- anchors (hashes of log entries that are kept elsewhere) -------------------------------------------------------


def test_external_hashes_match_the_log_after_new_entries(store: MemoryStore) -> None:
    """The anchors also stay valid if the run is killed between two anchors."""
    actors = Actors.begin(store).train(1)
    anchors = [first_anchor(store), newest_anchor(Log(store).state)]
    assert check_anchors(store, anchors) == []
    actors.train(2)
    assert check_anchors(store, [*anchors, newest_anchor(Log(store).state)]) == []


def test_rewritten_log_does_not_match_external_hashes(store: MemoryStore) -> None:
    Actors.begin(store).train(2)
    anchors = [first_anchor(store), newest_anchor(Log(store).state)]
    changed(store, 0, lambda body: whole(body, 1.0))
    assert audit(store, deep=True).clean
    assert [(v.kind, v.where) for v in check_anchors(store, anchors)] == [
        ("altered", entry_path(anchor.n)) for anchor in anchors
    ]


def test_truncated_log_does_not_match_the_newest_external_hash(store: MemoryStore) -> None:
    Actors.begin(store).train(2)
    anchor = newest_anchor(Log(store).state)
    store.delete(entry_path(anchor.n))
    assert [(v.kind, v.where) for v in check_anchors(store, [anchor])] == [("gap", entry_path(anchor.n))]


def test_printed_anchor_can_be_given_as_an_option() -> None:
    anchor = Anchor(12, "ab" * 32)
    assert parse_anchor(str(anchor)) == anchor


@pytest.mark.parametrize("text", ["", "12", "12:", "12:abc", ":" + "ab" * 32, "-1:" + "ab" * 32, "12:" + "AB" * 32])
def test_malformed_anchor_option_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="anchor"):
        parse_anchor(text)


def test_anchor_is_the_hash_of_its_log_entry(store: MemoryStore) -> None:
    Actors.begin(store)
    assert first_anchor(store).sha256 == encode(read(store)[0]).sha256
