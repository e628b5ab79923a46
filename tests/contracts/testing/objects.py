"""Tests the contract of object stores, which `rollflow.storage.objects.base` describes."""

from __future__ import annotations

import hashlib
import os
import pickle
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollflow.storage.errors import Conflict, Missing
from rollflow.storage.objects.base import Data, ObjectStore, split_buffers
from rollflow.testing.bounds import HANG_SECONDS, assert_raises


def race_to_create(store: ObjectStore, path: str, contents: list[bytes]) -> list[bytes]:
    """Start all writers at the same time; return the contents whose writers did not get `Conflict`."""
    start = threading.Barrier(len(contents))

    def write(content: bytes) -> list[bytes]:
        start.wait(HANG_SECONDS)
        try:
            store.create(path, content)
        except Conflict:
            return []
        return [content]

    with ThreadPoolExecutor(len(contents)) as pool:
        return [winner for winners in pool.map(write, contents) for winner in winners]


class ObjectStoreContract:
    """Tests of an object store. A subclass builds an empty store by `build`."""

    def build(self, folder: Path) -> ObjectStore:
        """Return an empty store; `folder` is an empty folder that the store may use."""
        raise NotImplementedError(f"{type(self).__name__} must build the store: def build(self, folder)")

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        """Return the store under test; a subclass may override this fixture."""
        return self.build(tmp_path)

    @pytest.mark.parametrize("write", ["put", "create"])
    @pytest.mark.parametrize(
        "data",
        [b"", b"abc", memoryview(b"view"), [], [b"", b"in ", memoryview(b"pieces")], os.urandom(20_000_000)],
        ids=["empty", "bytes", "view", "no pieces", "pieces", "20MB"],
    )
    def test_written_bytes_can_be_read_back(self, store: ObjectStore, write: str, data: Data, tmp_path: Path) -> None:
        """`get`, `fetch` and `stat` read what was written; `put` and `fetch` return the sha256 of the bytes."""
        before, expected = time.time(), b"".join(split_buffers(data))
        written, sha256 = getattr(store, write)("a/b.bin", data), hashlib.sha256(expected).hexdigest()
        assert written == (sha256 if write == "put" else None), "`put` must return the sha256 of the bytes"
        assert store.get("a/b.bin") == expected, "`get` must return the bytes that were written"
        assert store.fetch("a/b.bin", tmp_path / "copy") == sha256, "`fetch` must return the sha256 of the bytes"
        assert (tmp_path / "copy").read_bytes() == expected, "`fetch` must write the bytes into the file"
        assert store.exists("a/b.bin")
        found = store.stat("a/b.bin")
        assert found.size == len(expected)
        assert before - 2 <= found.modified <= time.time() + 2  # store and test use the same clock

    def test_put_replaces_an_existing_object(self, store: ObjectStore) -> None:
        store.put("a", b"a longer first content")
        store.put("a", b"second")
        assert store.get("a") == b"second", "`put` must replace an object"

    @pytest.mark.parametrize("first", ["put", "create"])
    @pytest.mark.parametrize("data", [b"", b"same"])
    def test_create_conflicts_with_any_earlier_write(self, store: ObjectStore, first: str, data: bytes) -> None:
        getattr(store, first)("a", data)
        with assert_raises(Conflict, "`create` must raise Conflict if the object exists", match="a exists"):
            store.create("a", data)
        assert store.get("a") == data, "`create` must not change an object that exists"

    def test_only_one_of_racing_threads_creates_an_object(self, store: ObjectStore) -> None:
        for turn in range(5):
            winners = race_to_create(store, f"turn/{turn}", [b"%d" % writer for writer in range(12)])
            assert winners == [store.get(f"turn/{turn}")], "exactly one of several racing writers must create an object"

    def test_one_of_racing_threads_creates_an_object_of_equal_bytes(self, store: ObjectStore) -> None:
        winners = race_to_create(store, "a", [b"same"] * 8)
        assert len(winners) == 1, "exactly one of several racing writers must create an object"

    def test_reader_never_sees_a_mixture_of_puts(self, store: ObjectStore) -> None:
        contents = [bytes([letter]) * 200_000 for letter in b"abcd"]
        store.put("a", contents[0])

        def write() -> None:
            for turn in range(12):
                store.put("a", contents[turn % 4])

        with ThreadPoolExecutor(2) as pool:
            writers = [pool.submit(write) for _ in range(2)]
            while not all(writer.done() for writer in writers):
                assert store.get("a") in contents, "a reader must see one whole object, while others replace it"
            for writer in writers:
                writer.result()

    def test_second_store_sees_every_change_at_once(self, store: ObjectStore) -> None:
        other = pickle.loads(pickle.dumps(store))  # noqa: S301 (our own bytes)
        assert not other.exists("a/b")
        assert list(other.list()) == []
        store.create("a/b", b"1")
        assert other.exists("a/b"), "another process must see an object as soon as it is written"
        assert list(other.list("a")) == ["a/b"]
        store.put("a/b", b"2")
        assert other.get("a/b") == b"2"
        other.delete("a/b")
        assert not store.exists("a/b")
        assert list(store.list()) == []
        store.create("a/b", b"3")

    def test_list_is_sorted_and_contains_only_its_folder(self, store: ObjectStore) -> None:
        paths = ["a-b", "a/b", "a/c/d", "ab/c", "z", "é"]
        for path in reversed(paths):
            store.put(path, b"x")
        assert list(store.list()) == sorted(paths), "`list` must give all paths, sorted"
        assert list(store.list("a")) == ["a/b", "a/c/d"]
        assert list(store.list("a/c")) == ["a/c/d"]
        assert list(store.list("nothing")) == []
        assert list(store.list(after="a/b")) == sorted(path for path in paths if path > "a/b")
        assert list(store.list("a", after="a/b")) == ["a/c/d"]
        assert list(store.list("a", after="a/c/d")) == []
        assert list(store.list("a", after="a/a")) == ["a/b", "a/c/d"]

    def test_store_lists_direct_subfolders(self, store: ObjectStore) -> None:
        for path in ("runs/b/log/0", "runs/b/log/1", "runs/a/x", "runs/file", "runs2/c/x", "é/f"):
            store.put(path, b"x")
        assert list(store.folders("runs")) == ["a", "b"]
        assert list(store.folders("runs/b")) == ["log"]
        assert list(store.folders("runs/a")) == []
        assert list(store.folders("nothing")) == []
        assert list(store.folders("runs/file")) == []

    def test_missing_object_raises_an_error(self, store: ObjectStore, tmp_path: Path) -> None:
        store.put("a/b", b"x")
        for path in ("c", "a", "a/b/c"):
            with assert_raises(Missing, "a missing object must raise Missing", match=path):
                store.get(path)
            with assert_raises(Missing, "a missing object must raise Missing", match=path):
                store.stat(path)
            with assert_raises(Missing, "a missing object must raise Missing", match=path):
                store.fetch(path, tmp_path / uuid.uuid4().hex)
            assert not store.exists(path)
            store.delete(path)
        assert store.exists("a/b")

    @pytest.mark.parametrize("size", [5, 3_000_000])
    def test_object_is_created_with_the_file_it_names(self, store: ObjectStore, size: int) -> None:
        data, seen = os.urandom(size), list[bool]()

        def content(sha256: str) -> bytes:
            seen.append(store.exists("a/record"))
            return sha256.encode()

        sha256 = store.create_naming("a/record", content, "b/file", [data[:3], memoryview(data)[3:]])
        assert sha256 == hashlib.sha256(data).hexdigest()
        assert store.get("a/record") == sha256.encode()
        assert store.get("b/file") == data
        assert seen == [False]
        with assert_raises(Conflict, "`create_naming` must raise Conflict if the record exists"):
            store.create_naming("a/record", lambda _: b"another", "b/second", b"data")
        assert store.get("a/record") == sha256.encode()

    def test_one_of_racing_threads_creates_an_object_from_a_file(self, store: ObjectStore) -> None:
        start = threading.Barrier(8)

        def write(number: int) -> list[int]:
            start.wait(HANG_SECONDS)
            try:
                store.create_naming("record", lambda _: b"%d" % number, f"file-{number}", b"data of %d" % number)
            except Conflict:
                return []
            return [number]

        with ThreadPoolExecutor(8) as pool:
            [winner] = [number for won in pool.map(write, range(8)) for number in won]
        assert store.get("record") == b"%d" % winner
        assert store.get(f"file-{winner}") == b"data of %d" % winner

    @pytest.mark.parametrize("path", ["", "/a", "a/", "a//b", ".", "..", "../a", "a/..", "a/../b", "a/./b", "a\0b"])
    def test_path_outside_the_store_is_refused_by_every_method(
        self, store: ObjectStore, path: str, tmp_path: Path
    ) -> None:
        """No path leads out of a store's root."""
        calls: list[Callable[[], object]] = [
            lambda: store.put(path, b""),
            lambda: store.create(path, b""),
            lambda: store.create_naming(path, lambda _: b"", "file", b""),
            lambda: store.create_naming("record", lambda _: b"", path, b""),
            lambda: store.get(path),
            lambda: store.fetch(path, tmp_path / "copy"),
            lambda: store.exists(path),
            lambda: store.stat(path),
            lambda: store.delete(path),
            lambda: store.child(path),
            lambda: store.list(path or "/"),
        ]
        for call in calls:
            with assert_raises(ValueError, "a bad path must raise ValueError", match="is not a valid path"):
                call()
        assert not list((tmp_path / "store").rglob("*"))

    def test_child_is_a_subfolder_of_the_same_store(self, store: ObjectStore) -> None:
        child = store.child("a").child("b/c")
        child.create("d", b"x")
        assert store.get("a/b/c/d") == b"x"
        assert list(child.list()) == ["d"]
        assert child.uri == f"{store.uri}/a/b/c"
        with assert_raises(Conflict, "a child must write into the store's own folder"):
            store.create("a/b/c/d", b"x")

    def test_store_check_passes_and_leaves_no_files(self, store: ObjectStore) -> None:
        store.check()
        assert list(store.list()) == []
