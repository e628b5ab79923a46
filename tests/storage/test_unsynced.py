"""A disk that fails once an object has its name: what was committed is not told as nothing."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from rollflow.storage.errors import Unreachable
from rollflow.storage.log.log import Log
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
    """After this, the first folder that is synced after a link is not: that disk failed."""
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


def test_what_has_its_name_is_not_told_as_not_written(local: LocalStore, break_next: Break) -> None:
    break_next()
    with pytest.raises(Unreachable, match=r"a/record is there.*Input/output error"):
        local.create("a/record", b"x")
    assert local.get("a/record") == b"x"
    break_next()
    with pytest.raises(Unreachable, match="a/other is there"):
        local.create_naming("a/other", str.encode, "b/file", b"y")
    assert local.exists("a/other")
    assert local.get("b/file") == b"y"


def test_what_is_left_beside_it_does_not_undo_it(local: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", failing)
        local.create("a/record", b"x")
    assert local.get("a/record") == b"x"
    assert len([*local.unfinished()]) == 1


def test_an_append_that_has_its_name_is_read_again_and_stands_once(local: LocalStore, break_next: Break) -> None:
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
    """Its disk fails once, when the entry is made and nothing of the file is there yet."""

    failures = 1

    def create_naming(self, path: str, content: Callable[[str], Data], file: str, data: Data) -> str:
        if Losing.failures:
            Losing.failures = 0
            content("0" * 64)
            raise Unreachable("the disk failed")
        return super().create_naming(path, content, file, data)


def test_a_file_that_a_disk_has_lost_is_written_again_with_its_entry(tmp_path: Path) -> None:
    """An entry of a second try must not name what the first one never wrote."""
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
