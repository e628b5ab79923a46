"""Tests of a disk that fails after an object got its name: an object that exists is not reported as unwritten."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from rollflow.storage.errors import Conflict, StoreFailed, Unreachable
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects import local as local_backend
from rollflow.storage.objects.base import Data
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.trajectories import TrajectoryStore
from tests.support.log_actors import Learner, Scheduler, Supervisor, chained, create_run, entries

Break = Callable[[], None]


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def break_next(monkeypatch: pytest.MonkeyPatch) -> Break:
    """Make the first folder sync after the next link fail."""
    fsync, link, state = os.fsync, os.link, {"armed": False, "linked": False}

    def failing(descriptor: int) -> None:
        if state["armed"] and state["linked"] and stat.S_ISDIR(os.fstat(descriptor).st_mode):
            state["armed"] = False
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    def linking(source: Path, target: Path) -> None:
        link(source, target)
        state["linked"] = True

    monkeypatch.setattr(local_backend.os, "fsync", failing)
    monkeypatch.setattr(local_backend.os, "link", linking)
    return lambda: state.update(armed=True, linked=False)


def test_error_after_a_create_says_that_the_object_exists(local: LocalStore, break_next: Break) -> None:
    break_next()
    with pytest.raises(Unreachable, match=r"a/record exists.*Input/output error"):
        local.create("a/record", b"x")
    assert local.get("a/record") == b"x"
    break_next()
    with pytest.raises(Unreachable, match="a/other exists"):
        local.create_naming("a/other", str.encode, "b/file", b"y")
    assert local.exists("a/other")
    assert local.get("b/file") == b"y"


def test_failed_cleanup_does_not_fail_a_create(local: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", failing)
        local.create("a/record", b"x")
    assert local.get("a/record") == b"x"
    assert len([*local.list_unfinished()]) == 1


def test_append_with_a_failed_sync_is_stored_once(local: LocalStore, break_next: Break) -> None:
    create_run(local)
    claim = Supervisor(local).writer.claim
    learner, scheduler = Learner(local, claim), Scheduler(local, claim)
    learner.publish()
    scheduler.log.follow()
    break_next()
    committed = scheduler.commit()
    learner.log.follow()
    break_next()
    published = learner.publish()
    told = Log(local).state
    assert (published.n, told.n, told.version, told.next_batch) == (committed.n + 1, committed.n + 1, 1, 1)
    assert chained(entries(local))
    assert len([*local.list("trajectories")]) == 1


class Losing(LocalStore):
    """A store whose disk fails once, when the log entry is created and the file that it names is not durable yet."""

    failures = 1

    def create_naming(self, path: str, content: Callable[[str], Data], file: str, data: Data) -> str:
        if Losing.failures:
            Losing.failures = 0
            content("0" * 64)
            raise Unreachable("the disk failed")
        return super().create_naming(path, content, file, data)


def test_lost_batch_file_is_written_again_with_its_log_entry(tmp_path: Path) -> None:
    """The entry of a second try must not name a file that the first try never wrote."""
    sound = LocalStore(tmp_path / "store")
    create_run(sound)
    claim = Supervisor(sound).writer.claim
    Learner(sound, claim).publish()
    scheduler = Scheduler(Losing(tmp_path / "store"), claim)
    scheduler.log.follow()
    scheduler.commit()
    [waiting] = Log(sound).state.waiting.values()
    assert sound.stat(waiting.file.path).size == waiting.file.size
    assert TrajectoryStore(Log(sound)).read(waiting.file) is not None


# --- false errors: the disk reports a failure, although the operation succeeded --------------------------------


def lost_answers(monkeypatch: pytest.MonkeyPatch, call: str, *, done: bool = True) -> None:
    """Make `os.link` (or another function) report a disk failure, either after it has done its work or instead of doing
    it.
    """
    real = getattr(os, call)

    def failing(*names: Path) -> None:
        if done:
            real(*names)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(local_backend.os, call, failing)


def unreadable(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    """Make reads of a path fail."""
    real = os.stat

    def failing(path: Path, **more: bool) -> os.stat_result:
        if path == target:
            raise OSError(errno.EIO, "Input/output error")
        return real(path, **more)

    monkeypatch.setattr(local_backend.os, "stat", failing)


def test_create_succeeds_if_its_hard_link_exists_despite_error(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost_answers(monkeypatch, "link")
    local.create("a/record", b"x")
    local.create_naming("a/other", str.encode, "b/file", b"y")
    assert (local.get("a/record"), local.get("b/file")) == (b"x", b"y")
    assert local.exists("a/other")
    assert [*local.list_unfinished()] == []


def test_error_before_a_create_says_that_nothing_was_written(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.check()
    lost_answers(monkeypatch, "link", done=False)
    with pytest.raises(StoreFailed, match="nothing was committed"):
        local.create("record", b"x")
    assert not local.exists("record")


def test_object_created_meanwhile_is_a_conflict(local: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(source: Path, target: Path) -> None:
        target.write_bytes(b"another one's")
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(local_backend.os, "link", late)
    with pytest.raises(Conflict):
        local.create("a/record", b"x")


@pytest.mark.parametrize("told", [errno.EIO, errno.EEXIST])
def test_create_with_an_unknown_result_raises_unreachable(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch, told: int
) -> None:
    link = os.link

    def linking(source: Path, target: Path) -> None:
        link(source, target)
        unreadable(monkeypatch, target)
        raise OSError(told, "it failed")

    monkeypatch.setattr(local_backend.os, "link", linking)
    with pytest.raises(Unreachable, match=r"it is unknown whether .*a/record was written"):
        local.create("a/record", b"x")


def test_put_succeeds_if_its_rename_happened_despite_an_error(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system without hard links, creators rename under a lock."""

    def unsupported(source: Path, target: Path) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(local_backend.os, "link", unsupported)
    lost_answers(monkeypatch, "rename")
    local.create("a/record", b"x")
    assert local.get("a/record") == b"x"


@pytest.mark.parametrize("done", [True, False])
def test_put_with_a_lost_response_reads_the_object_back(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch, *, done: bool
) -> None:
    local.put("a/object", b"old")
    lost_answers(monkeypatch, "replace", done=done)
    if done:
        assert local.put("a/object", b"new") == hashlib.sha256(b"new").hexdigest()
        assert local.get("a/object") == b"new"
        return
    with pytest.raises(StoreFailed, match="nothing was committed"):
        local.put("a/object", b"new")
    assert local.get("a/object") == b"old"


def test_put_with_an_unknown_result_raises_unreachable(local: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    local.put("a/object", b"old")
    with monkeypatch.context() as patch:
        lost_answers(patch, "replace")
        unreadable(patch, local.local_path("a/object"))
        with pytest.raises(Unreachable, match=r"it is unknown whether .*a/object was written"):
            local.put("a/object", b"new")
    assert local.get("a/object") == b"new"


def test_error_after_a_put_says_that_the_object_exists(local: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder cannot be synced: the object exists, but may not survive a power cut."""
    local.put("a/object", b"old")
    with monkeypatch.context() as patch:
        failing_folder(patch, local.root / "a")
        with pytest.raises(Unreachable, match=r"a/object exists.*Input/output error"):
            local.put("a/object", b"new")
    assert local.get("a/object") == b"new"


def test_put_into_a_folder_that_cannot_be_synced_fails(local: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    local.put("object", b"old")
    failing_folder(monkeypatch, local.root)
    with pytest.raises(StoreFailed, match="nothing was committed"):
        local.put("new/object", b"new")
    assert not local.exists("new/object")


def failing_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make each sync of this folder fail."""
    fsync = os.fsync

    def failing(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), os.lstat(folder)):
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(local_backend.os, "fsync", failing)


def test_append_with_a_failed_hard_link_is_stored_once(local: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    create_run(local)
    claim = Supervisor(local).writer.claim
    learner, scheduler = Learner(local, claim), Scheduler(local, claim)
    learner.publish()
    scheduler.log.follow()
    lost_answers(monkeypatch, "link")
    committed = scheduler.commit()
    assert Log(local).state.n == committed.n
    assert chained(entries(local))
