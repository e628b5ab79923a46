"""Tests of a machine's cache folder: all processes share one download, folders are complete, their number is limited,
and folders in use are kept.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from rollflow.storage.errors import ConfigError, Corrupt, StoreFailed, Unreachable
from rollflow.storage.objects import node_cache as cache_of_a_node
from rollflow.storage.objects.node_cache import FILLING, KEPT, HeldFolder, NodeCache
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.runtime.node import node_cache
from tests.support.waiting import HANG_SECONDS

SPAWN = multiprocessing.get_context("spawn")
HALVES = ("first", "second")


def fill(folder: Path) -> None:
    """Fill a folder, and count this call in a file outside of the cache."""
    for half in HALVES:
        (folder / half).write_text(half)
        time.sleep(0.05)
    with (folder.parent.parent.parent / "fills").open("a") as log:
        log.write(".")


def whole(folder: Path) -> bool:
    return all((folder / half).exists() for half in HALVES)


def hold(cache: Path, name: str = "1", store: str = "s3://one") -> HeldFolder:
    return NodeCache(cache, store).hold(name, fill, whole)


def fills(cache: Path) -> int:
    log = cache.parent / "fills"
    return len(log.read_text()) if log.exists() else 0


def names(cache: Path) -> set[str]:
    """List all names in the cache except the locks."""
    return {path.name for path in cache.glob("*/*") if path.name != ".lock"}


def holder(cache: Path, name: str, told: Connection) -> None:
    """Hold a cached folder until this process is killed. The function runs in a process of its own."""
    held = hold(cache, name)
    told.send(whole(held.folder))
    time.sleep(600)


def half_filler(cache: Path, store: str, told: Connection) -> None:
    """Fill half of a cached folder until this process is killed. The function runs in a process of its own."""

    def half(folder: Path) -> None:
        (folder / HALVES[0]).write_text("")
        told.send(True)
        time.sleep(600)

    NodeCache(cache, store).hold("1", half, whole)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def processes() -> Iterator[list[multiprocessing.process.BaseProcess]]:
    started: list[multiprocessing.process.BaseProcess] = []
    yield started
    for process in started:
        process.kill()
        process.join()


def start(processes: list[multiprocessing.process.BaseProcess], work: object, *arguments: object) -> Connection:
    ours, theirs = SPAWN.Pipe()
    processes.append(SPAWN.Process(target=work, args=(*arguments, theirs)))  # type: ignore[arg-type]
    processes[-1].start()
    return ours


def answered(told: Connection) -> bool:
    assert told.poll(60)
    return bool(told.recv())


@pytest.mark.long
def test_concurrent_processes_download_weights_once(
    cache: Path, processes: list[multiprocessing.process.BaseProcess]
) -> None:
    told = [start(processes, holder, cache, "1") for _ in range(4)]
    assert all(map(answered, told))
    assert fills(cache) == 1
    assert names(cache) == {"1"}


@pytest.mark.long
def test_partly_downloaded_folder_is_never_used(
    cache: Path, processes: list[multiprocessing.process.BaseProcess]
) -> None:
    assert answered(start(processes, half_filler, cache, "s3://one"))
    waiting = start(processes, holder, cache, "1")
    assert not waiting.poll(1.0), "it waits for the one that fetches"
    os.kill(processes[0].pid or 0, signal.SIGKILL)
    assert answered(waiting)
    assert names(cache) == {"1"}


def test_next_download_removes_a_partly_downloaded_folder(
    cache: Path, processes: list[multiprocessing.process.BaseProcess]
) -> None:
    """A download of any run removes an incomplete folder, because the run that began to fill the folder may have
    ended.
    """
    for store in ("s3://ended", "s3://one"):
        assert answered(start(processes, half_filler, cache, store))
    os.kill(processes[0].pid or 0, signal.SIGKILL)
    processes[0].join()
    hold(cache, store="s3://two")
    left = [path for path in cache.glob("*/*") if path.name.startswith(FILLING)]
    assert len(left) == 1, "that of the living one"
    assert (left[0] / HALVES[0]).exists()


def test_cached_folders_are_limited_except_those_in_use(
    cache: Path, processes: list[multiprocessing.process.BaseProcess]
) -> None:
    assert answered(start(processes, holder, cache, "old"))
    for number in range(2 * KEPT):
        os.utime(next(cache.glob("*/old")), (0, 0))  # this folder is now the least recently used one
        hold(cache, str(number), store=f"s3://{number}")
        assert "old" in names(cache)
        assert len(names(cache)) <= KEPT
    os.kill(processes[0].pid or 0, signal.SIGKILL)
    processes[0].join()
    hold(cache, "last")
    assert names(cache) == {str(2 * KEPT - 2), str(2 * KEPT - 1), "last"}
    kept = hold(cache, str(2 * KEPT - 2), store=f"s3://{2 * KEPT - 2}")
    assert fills(cache) == 2 * KEPT + 2, "it was there"
    for number in range(KEPT):
        hold(cache, f"more {number}")
    assert whole(kept.folder)


def test_more_cached_folders_may_be_in_use_than_the_limit(cache: Path) -> None:
    held = [hold(cache, str(number)) for number in range(KEPT + 3)]
    assert all(whole(one.folder) for one in held)
    held.clear()
    hold(cache, "one more")
    assert len(names(cache)) == KEPT


def test_failed_download_leaves_no_file_in_the_cache(cache: Path) -> None:
    def wrong(folder: Path) -> None:
        (folder / "first").write_text("wrong")
        raise Corrupt("its bytes are not those that were committed")

    with pytest.raises(Corrupt):
        NodeCache(cache, "s3://one").hold("1", wrong, whole)
    assert names(cache) == set()
    assert whole(hold(cache).folder)


def test_full_disk_removes_cached_folders_for_a_new_one(cache: Path) -> None:
    """On a full disk, folders that no process uses are removed before a download fails. Folders in use are kept."""
    held = hold(cache, "held")
    hold(cache, "unused")

    def small_disk(folder: Path) -> None:
        if len([one for one in folder.parent.glob("*") if not one.name.startswith(".")]) > 1:
            raise StoreFailed("there is no space left")
        fill(folder)

    assert whole(NodeCache(cache, "s3://one").hold("new", small_disk, whole).folder)
    assert names(cache) == {"held", "new"}
    second = hold(cache, "second")
    with pytest.raises(StoreFailed):
        NodeCache(cache, "s3://one").hold("newer", small_disk, whole)
    assert whole(held.folder)
    assert whole(second.folder)


def test_incomplete_cached_folder_is_filled_even_if_in_use(cache: Path) -> None:
    held = hold(cache)
    (held.folder / "second").unlink()
    assert whole(hold(cache).folder)
    assert fills(cache) == 2


def test_cached_folder_from_before_the_last_boot_is_not_used(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of a cached folder were never synced, so a power cut may have truncated them."""
    before = hold(cache).folder
    (tmp_path / "boot").write_text("another")
    monkeypatch.setattr(cache_of_a_node, "BOOT", tmp_path / "boot")
    assert hold(cache).folder != before
    assert fills(cache) == 2


def test_waiting_process_waits_as_long_as_a_download_may_take(
    cache: Path, processes: list[multiprocessing.process.BaseProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_of_a_node, "WAIT_SECONDS", 0.0)
    assert answered(start(processes, half_filler, cache, "s3://one"))
    with pytest.raises(Unreachable, match="another process on this node did not finish the download of 1"):
        hold(cache)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(NodeCache(cache, "s3://one", patience=300.0).hold, "1", fill, whole)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.5)
        os.kill(processes[0].pid or 0, signal.SIGKILL)
        assert whole(waiting.result(timeout=HANG_SECONDS).folder)


def test_each_store_has_its_own_cache_folder(cache: Path) -> None:
    assert hold(cache, store="s3://one").folder != hold(cache, store="s3://two").folder


def test_pickled_run_context_contains_no_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "there"))
    packed = pickle.dumps(RunContext("s3://bucket/runs/one", tmp_path / "here"))
    assert str(tmp_path).encode() not in packed
    arrived = pickle.loads(packed)  # noqa: S301 - Ray pickles stores
    assert arrived.uri == "s3://bucket/runs/one"
    assert arrived.cache.is_relative_to(tmp_path / "there")


def test_each_node_has_its_own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("ROLLFLOW_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert node_cache().is_relative_to(tmp_path / "home/.rollflow")
    own = tmp_path / f"rollflow-{os.getuid()}"
    with monkeypatch.context() as nobody:  # a user id without an entry in the password database
        nobody.delenv("HOME")
        nobody.setattr("pwd.getpwuid", {}.__getitem__)
        assert node_cache().is_relative_to(own)
    monkeypatch.setenv("HOME", "/proc/nobody")  # a home folder where no file can be written
    assert node_cache().is_relative_to(own)
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)
    with pytest.raises(
        ConfigError, match=r"ROLLFLOW_HOME is not set, and .* belongs to other users, too; set ROLLFLOW_HOME"
    ):
        node_cache()
    own.rmdir()
    own.symlink_to(tmp_path / "home")
    with pytest.raises(ConfigError, match="belongs to other users, too"):
        node_cache()
