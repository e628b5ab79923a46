"""Tests of the cost of a commit: the numbers of calls of `decide`, of hashes and of disk syncs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollflow.storage import arrow_rows
from rollflow.storage.batch import TrajectoryBatch, pack_group
from rollflow.storage.log import run_log as log_module
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects import ObjectStore, disk
from rollflow.storage.objects import local as local_backend
from rollflow.storage.objects.local import LocalStore
from tests.support.batches import group, ready, staged


def test_log_state_after_a_commit_equals_that_of_a_reader(run: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, writer = ready(run)
    decided = list[Any]()
    decide = log_module.decide

    def counted(*arguments: Any) -> Any:
        decided.append(arguments)
        return decide(*arguments)

    monkeypatch.setattr(log_module, "decide", counted)
    entry, _ = batches.commit(writer, staged())
    assert len(decided) == 1
    assert isinstance(entry.body, BatchCommitted)
    assert batches.log.state.waiting[0].file == entry.body.file
    assert len(entry.body.file.sha256) == 64
    assert batches.log.state == Log(run).state


def test_batch_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed, digest = list[int](), disk.hash_pieces

    def counted(parts: Sequence[memoryview]) -> str:
        hashed.append(sum(map(len, parts)))
        return digest(parts)

    monkeypatch.setattr(disk, "hash_pieces", counted)
    for size in (5, 3_000_000):
        data = os.urandom(size)
        named = LocalStore(tmp_path).create_naming(f"a/{size}", str.encode, f"b/{size}", data)
        assert named == hashlib.sha256(data).hexdigest()
    assert hashed == [5, 3_000_000]


def test_batch_file_does_not_depend_on_how_columns_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that are joined in Arrow's or in Python's memory give the same file, even if a group adds nothing to a
    column.
    """
    one = group(0).trajectories[0]
    silent = replace(one, tokens=(), loss_mask=(), logprobs=(), versions=(), reason="")
    long = replace(one, tokens=(7,) * 3000, loss_mask=(True,) * 3000, logprobs=(-1.0,) * 3000, versions=(0,) * 3000)
    groups = [replace(group(n), trajectories=(each, each)) for n, each in enumerate((silent, long, one, silent))]
    expected = TrajectoryBatch.from_groups(groups).to_bytes()
    made = list(map(pack_group, groups))
    allocated, allocate = list[int](), arrow_rows.pa.allocate_buffer
    monkeypatch.setattr(arrow_rows.pa, "allocate_buffer", lambda size: allocated.append(size) or allocate(size))
    for least, joined in ((1 << 20, 0), (24_000, 3), (1, 19)):
        monkeypatch.setattr(arrow_rows, "LONG", least)
        assert TrajectoryBatch.from_groups(made).to_bytes() == expected
        assert len(allocated) >= joined
        assert min(allocated, default=least) >= least
        allocated.clear()
    assert TrajectoryBatch.from_bytes(expected).groups() == groups


def synced_by(work: Callable[[], object], root: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names below `root` that `work` synced, in order."""
    synced, fsync = list[str](), os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), root))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(local_backend.os, "fsync", noted)
        work()
    return synced


def test_batch_commit_syncs_both_files_and_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = LocalStore(tmp_path / "run")
    batches, writer = ready(run, async_ratio=1.0)
    batches.commit(writer, staged())
    synced = synced_by(lambda: batches.commit(writer, staged(1)), run.root, monkeypatch)
    file, entry, *folders = synced
    assert file.startswith("trajectories/00000001-")
    assert entry.startswith(".tmp/")
    assert folders == ["trajectories", "log"]


def test_new_folder_is_synced_to_disk_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = LocalStore(tmp_path / "run")
    # these folders were created by a writer that was killed before it synced them
    (run.root / "a/b").mkdir(parents=True)
    folders = [name for name in synced_by(lambda: run.put("a/b/c", b"1"), run.root, monkeypatch) if ".tmp" not in name]
    assert {".", "a", "a/b"} <= {*folders}
    again = synced_by(lambda: run.put("a/b/d", b"2"), run.root, monkeypatch)
    assert [name for name in again if not name.startswith(("a/b/d", ".tmp"))] == ["a/b"]
    (run.root / "a/b/c").unlink()
    (run.root / "a/b/d").unlink()
    (run.root / "a/b").rmdir()
    anew = synced_by(lambda: run.create("a/b/e", b"3"), run.root, monkeypatch)
    assert {"a", "a/b"} <= {*anew}
