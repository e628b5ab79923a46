"""Retention and garbage collection, against a model that follows the rules word by word."""

from __future__ import annotations

import os
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moto.s3.models import s3_backends

from rollflow.storage.collect import collect, orphans, store_clock, sweep
from rollflow.storage.log.entries import entry_path
from rollflow.storage.objects import ObjectStore
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.objects.s3 import S3Store
from rollflow.storage.policies import Manifest, PolicyStore, Retention, manifest_path
from tests.support.described import describe
from tests.support.s3_server import s3_server, use

RETENTIONS = st.builds(Retention, st.integers(1, 6), st.integers(1, 7), st.integers(1, 6))
DAY = 24 * 3600.0


def publish(store: PolicyStore, version: int) -> None:
    weights = store.stage(version, {"weights/model.safetensors": b"w%d" % version})
    state = store.stage(version, {"learner/state.safetensors": b"s"} if store.retention.stores_state(version) else {})
    store.publish(Manifest(version, None, weights, state, None, writer=store.writer))


def required(retention: Retention, latest: int) -> set[int]:
    """The versions whose objects must be there: kept ones, and from where each of them, and the next, is trained."""
    kept = {v for v in range(latest + 1) if v > latest - retention.keep_last or v % retention.keep_every == 0}
    bases = set()
    for version in (*kept, latest + 1):
        parent = version - 1
        while parent >= 0 and parent % retention.state_every:
            parent -= 1
        bases |= {parent} - {-1}
    return kept | bases


def present(run: ObjectStore, latest: int) -> set[int]:
    manifests = [PolicyStore(run).manifest(v) for v in range(latest + 1)]
    whole = {m.version for m in manifests if all(run.exists(o.path) for o in (*m.weights, *m.learner))}
    partial = {m.version for m in manifests if any(run.exists(o.path) for o in (*m.weights, *m.learner))}
    assert whole == partial
    return whole


@given(RETENTIONS, st.integers(1, 40))
@settings(deadline=None)
def test_exactly_what_is_needed_stays(retention: Retention, versions: int) -> None:
    """After every publish; and what was needed once and is not needed now is never needed again."""
    run = MemoryStore(uuid.uuid4().hex)
    store = PolicyStore(run, retention)
    for latest in range(versions):
        publish(store, latest)
        assert present(run, latest) == required(retention, latest)
        assert {v for v in range(latest + 1) if retention.needed(v, latest)} == required(retention, latest)


@given(RETENTIONS, st.lists(st.booleans(), min_size=1, max_size=30))
@settings(deadline=None)
def test_what_a_killed_learner_did_not_remove_is_collected(retention: Retention, killed: list[bool]) -> None:
    """Killed between the publish and the pruning, as often as one likes: the collection leaves what is needed."""
    run = MemoryStore(uuid.uuid4().hex)
    store = PolicyStore(run, retention)
    for version, dies in enumerate(killed):
        store._prune = (lambda latest: None) if dies else PolicyStore._prune.__get__(store)  # type: ignore[method-assign]
        publish(store, version)
    latest = len(killed) - 1
    assert present(run, latest) >= required(retention, latest)
    freed = collect(run, orphans(run, retention, 0.0, store_clock(run)))
    assert present(run, latest) == required(retention, latest)
    assert all(run.exists(manifest_path(version)) for version in range(latest + 1))
    assert orphans(run, retention, 0.0, store_clock(run)) == []
    assert freed == 0 or any(killed)


def test_what_an_evaluation_still_needs_is_not_collected() -> None:
    """A learner that put a version's pruning off, and died, leaves it to the collection, which must wait as well."""
    run = MemoryStore(uuid.uuid4().hex)
    store = PolicyStore(run, Retention(2, 100, 1), in_use=lambda version: version == 3)
    for version in range(8):
        publish(store, version)
    assert 3 in present(run, 7)
    assert orphans(run, store.retention, 0.0, store_clock(run), store.in_use) == []
    collect(run, orphans(run, store.retention, 0.0, store_clock(run)))
    assert 3 not in present(run, 7)


@pytest.fixture
def run(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def age(run: LocalStore, path: str, seconds: float) -> None:
    then = store_clock(run) - seconds
    os.utime(run.local_path(path), (then, then))


def test_only_unnamed_objects_of_that_age_are_orphans(run: LocalStore) -> None:
    """A loser's shards, a killed upload, a batch file whose commit never came; not what is new, named or the ledger."""
    publish(PolicyStore(run), 0)
    [loser] = PolicyStore(run, writer="loser").stage(0, {"weights/model.safetensors": b"lost"})
    [killed, new] = PolicyStore(run, writer="killed").stage(1, {"weights/a": b"half", "weights/b": b"new"})
    run.put("trajectories/00000000-named.arrow", b"batch")
    run.put("trajectories/00000000-lost.arrow", b"batch")
    run.put("trajectories/00000000.json", b'{"file": "trajectories/00000000-named.arrow"}')
    run.put("trajectories/00000000.1.json", b'{"file": ""}')
    run.put("trajectories/voids/00000000.json", b'{"batch": 0}')
    describe(run)
    before = set(run.list())
    for path in before - {new.path}:
        age(run, path, 2 * DAY)
    found = orphans(run, Retention(), DAY, store_clock(run))
    assert {o.path: o.why for o in found} == {
        loser.path: "no manifest names it",
        killed.path: "no manifest names it",
        "trajectories/00000000-lost.arrow": "no batch commit names it",
    }
    assert all(DAY < o.age < 3 * DAY for o in found)
    assert collect(run, found) == sum(o.size for o in found) == 4 + 4 + 5
    assert set(run.list()) == before - {o.path for o in found}


def test_what_killed_writers_left_goes_after_a_week_and_nothing_that_is_being_written(run: LocalStore) -> None:
    describe(run)
    scratch = run.root / ".tmp"
    for name, days in (("a", 8), ("b", 6), ("c", 40)):
        (scratch / name).write_bytes(b"half")
        then = store_clock(run) - days * DAY
        os.utime(scratch / name, (then, then))
    found = orphans(run, Retention(), 0.0, store_clock(run))
    assert [(o.path, o.size, o.why) for o in found] == [
        (".tmp/a", 4, "its writer never ended it"),
        (".tmp/c", 4, "its writer never ended it"),
    ]
    assert [o.path for o in orphans(run, Retention(), 30 * DAY, store_clock(run))] == [".tmp/c"]
    assert sweep(run) == 8
    assert [path.name for path in scratch.iterdir()] == ["b"]
    assert list(run.list()) == [entry_path(0)]


def test_an_upload_that_nobody_ends_goes_and_a_live_one_beside_it_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server("uploads") as endpoint:
        use(endpoint, monkeypatch)
        run, other = S3Store("uploads/runs/mine"), S3Store("uploads/runs/mine-too")
        stale, live, empty, elsewhere = (
            begun(run, "stale"),
            begun(run, "live"),
            begun(run, "empty", 0),
            begun(other, "a"),
        )
        for upload in (stale, elsewhere):
            for part in uploads()[upload].parts.values():
                part.last_modified -= timedelta(days=8)
        found = orphans(run, Retention(), 0.0, store_clock(run))
        assert [(o.path, o.size, o.why) for o in found] == [("stale", PART, "its writer never ended it")]
        assert sweep(run) == PART
        assert set(uploads()) == {live, empty, elsewhere}
        ended(run, "live", live)
        assert run.stat("live").size == PART
        assert sweep(run) == 0


PART = 1000


def uploads() -> dict[str, Any]:
    """The server's own, by id."""
    [backend] = [backend for account in s3_backends.values() for backend in account.values()]
    found: dict[str, Any] = backend.buckets["uploads"].multiparts
    return found


def begun(run: S3Store, key: str, parts: int = 1) -> str:
    """An upload of so many parts (one may be small) that is not ended; its id."""
    upload: str = run._call("create_multipart_upload", Key=run._key(key))["UploadId"]
    for number in range(1, parts + 1):
        run._call("upload_part", Key=run._key(key), UploadId=upload, PartNumber=number, Body=b"x" * PART)
    return upload


def ended(run: S3Store, key: str, upload: str) -> None:
    parts = run._call("list_parts", Key=run._key(key), UploadId=upload)["Parts"]
    listed = {"Parts": [{name: part[name] for name in ("PartNumber", "ETag")} for part in parts]}
    run._call("complete_multipart_upload", Key=run._key(key), UploadId=upload, MultipartUpload=listed)


def test_nothing_goes_on_the_word_of_an_unreadable_record(run: LocalStore) -> None:
    publish(PolicyStore(run), 0)
    run.put(manifest_path(0), b"not JSON")
    run.put("trajectories/00000003-aa.arrow", b"batch")
    run.put("trajectories/00000003.json", b"not JSON")
    run.put("trajectories/00000004-aa.arrow", b"batch")
    assert [o.path for o in orphans(run, Retention(), 0.0, store_clock(run))] == ["trajectories/00000004-aa.arrow"]
