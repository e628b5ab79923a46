"""Tests of encoded log entries: JSON, index objects, and malformed entries."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.errors import Corrupt
from rollflow.storage.log import entries as entries_module
from rollflow.storage.log import snapshots
from rollflow.storage.log.entries import (
    BatchCommitted,
    BatchVoided,
    Body,
    Claimed,
    Entry,
    TrainedGroup,
    VersionPublished,
    decode,
    encode,
    entry_path,
    open_sealed,
    seal_tree,
)
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import Discard, DiscardReason, GroupKey, StoredObject

FILE = StoredObject("weights", 3, "ab")


def entry(body: Body, n: int = 7) -> Entry:
    return Entry(n, "", "id", "learner", 3, 2, 4, 1.5, body)


def test_log_entry_above_the_size_limit_has_an_index_object(monkeypatch: pytest.MonkeyPatch) -> None:
    assert entries_module.LARGEST == 256 * 1024
    one = entry(VersionPublished(1, 5, (FILE,), (FILE,), metrics={"loss": 0.5}))
    size = len(encode(one).data)
    monkeypatch.setattr(entries_module, "LARGEST", size)
    assert encode(one).index is None
    monkeypatch.setattr(entries_module, "LARGEST", size - 1)
    split = encode(one)
    assert split.index is not None
    assert split.index.path == f"log_index/{split.index.sha256}.json"
    assert split.index.size == len(split.index_data)
    assert json.loads(split.index_data).keys() == {"weights", "state", "probe"}
    assert json.loads(split.data)["body"].keys() & {"weights", "state", "probe"} == set()
    read = decode(split.data, 7, {split.index.path: split.index_data}.__getitem__)
    assert (read.entry, read.sha256) == (one, split.sha256)


def test_json_of_a_log_entry_contains_every_field() -> None:
    """The JSON also contains fields with default values, so that other readers need not know the defaults."""
    tree = json.loads(encode(entry(BatchCommitted(3, FILE, 6, (TrainedGroup(4, 1, 2, 3, 9),), (8,)))).data)
    tree.pop("seal")
    assert tree == {
        "n": 7,
        "prev": "",
        "id": "id",
        "role": "learner",
        "claim": 3,
        "version": 2,
        "batch": 4,
        "at": 1.5,
        "body": {
            "number": 3,
            "file": {"path": "weights", "size": 3, "sha256": "ab"},
            "rows": 6,
            "groups": [[4, 1, 2, 3, 9]],
            "issued": [8],
            "discards": [],
            "surplus_tokens": 0,
            "rates": [],
            "kind": "batch-committed",
        },
    }
    voided = {"number": 3, "entry": 5, "why": "damaged", "cause": "damaged", "kind": "batch-voided"}
    assert json.loads(encode(entry(BatchVoided(3, 5, "damaged"))).data)["body"] == voided
    claimed = {"under": None, "who": "", "cluster": "", "host": "", "process": 0, "kind": "claimed"}
    assert json.loads(encode(entry(Claimed())).data)["body"] == claimed


def test_log_entry_with_a_nan_is_not_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode(entry(VersionPublished(1, 5, (FILE,), metrics={"loss": float("nan")})))


def test_paths_of_log_entries_have_their_documented_form() -> None:
    assert entry_path(41) == "log/0000000041.json"
    assert TrainedGroup(4, 1, 2, 3, 9).key == GroupKey(4, 1)
    assert snapshots.snapshot_path(63, "0123456789abcdef" * 4) == "log_snapshots/0000000063-0123456789abcdef.json"
    assert [snapshots.segment_path(n) for n in (0, 63, 64)] == [
        "log_segments/0000000000.jsonl",
        "log_segments/0000000000.jsonl",
        "log_segments/0000000064.jsonl",
    ]
    assert [n for n in range(200) if snapshots.is_due(n)] == [63, 127, 191]


def resealed(change: Callable[[dict[str, Any]], None]) -> bytes:
    tree = open_sealed(encode(entry(BatchVoided(1, 5, "damaged"))).data)
    change(tree)
    return seal_tree(tree)


def test_old_void_entry_without_a_cause_is_read_as_damage() -> None:
    """If the entry of a voided batch names no cause, the cause is read as "damage". Unknown fields are ignored, so that
    older releases can read newer entries.
    """
    older, newer = (resealed(lambda tree, at=at: at(tree["body"])) for at in (lambda b: b.pop("cause"), knows_more))
    for data in (older, newer):
        assert decode(data, 7, dict[str, bytes]().__getitem__).entry.body == BatchVoided(1, 5, "damaged", "damaged")


def knows_more(body: dict[str, Any]) -> None:
    body["whence"] = "another version"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not an entry of a log"),
        (b"[]", "not an entry of a log"),
        (b"7", "not an entry of a log"),
        (b"{}", "the object was altered"),
        (resealed(lambda tree: tree.update(n=8)), "contains entry 8"),
        (resealed(lambda tree: tree.pop("body")), "1 fields of the entry are invalid"),
        (resealed(lambda tree: tree["body"].update(kind="promoted")), "1 fields of the entry are invalid"),
        (
            resealed(lambda tree: tree.update(index={"path": "log_index/x"})),
            "the object log_index/x, which lists the groups of the entry, is missing",
        ),
        (resealed(lambda tree: tree.update(index="log_index/x")), "not an entry of a log"),
        (resealed(lambda tree: tree.update(index={})), "not an entry of a log"),
        (resealed(lambda tree: tree.update(index={"path": 7})), "not an entry of a log"),
        (b"[" * 100_000, "not an entry of a log"),
    ],
)
def test_malformed_log_entry_is_corrupt(data: bytes, why: str) -> None:
    with pytest.raises(Corrupt, match=why) as caught:
        decode(data, 7, MemoryStore(uuid.uuid4().hex).get)
    assert "log/0000000007.json" in str(caught.value)


LEFT = Discard(GroupKey(4, 1), DiscardReason.STALE, 2, 9)
WHOLE = encode(entry(BatchCommitted(3, FILE, 8, (TrainedGroup(1, 0, 2, 3, 11),), (5, 6), (LEFT,), 4))).data


@settings(max_examples=500, deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255))
def test_every_changed_byte_of_a_log_entry_is_detected(place: int, value: int) -> None:
    """Any altered byte makes an entry corrupt, and never raises another error."""
    data = bytearray(WHOLE)
    data[place] = value
    try:
        assert decode(bytes(data), 7, lambda path: b"").entry == decode(WHOLE, 7, lambda path: b"").entry
    except Corrupt as error:
        assert entry_path(7) in str(error)  # noqa: PT017 - the entry may be corrupt or readable


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(WHOLE) - 1))
def test_truncated_log_entry_is_corrupt(length: int) -> None:
    with pytest.raises(Corrupt, match=entry_path(7)):
        decode(WHOLE[:length], 7, lambda path: b"")
