"""Tests the object store contract on every backend. Further tests check the guarantees of a single backend."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import moto.s3.responses
import pytest
import s3fs

from rollflow.storage.errors import ConfigError, Conflict, Corrupt, StoreFailed, Unreachable
from rollflow.storage.objects import ObjectStore, disk, open_store, s3_requests
from rollflow.storage.objects import local as local_backend
from rollflow.storage.objects.base import first_missing, split_buffers
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.objects.s3 import WRITER, S3Store
from rollflow.storage.objects.s3_requests import PART_BYTES, RetryLimits
from rollflow.testing.objects import ObjectStoreContract, race_to_create
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.forked import alone
from tests.support.s3_server import s3_server, use
from tests.support.waiting import HANG_SECONDS, until

BUCKET = "contract"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Start a moto server with one bucket; return its endpoint."""
    with s3_server(BUCKET) as endpoint:
        yield endpoint


@pytest.fixture
def aws(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set the usual AWS variables, so that clients find the server without other settings."""
    use(server, monkeypatch)
    return server


@pytest.fixture
def s3(aws: str) -> S3Store:
    return S3Store(f"{BUCKET}/{uuid.uuid4().hex}")


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture(params=["local", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    match request.param:
        case "local":
            return LocalStore(tmp_path / "store")
        case "memory":
            return MemoryStore(uuid.uuid4().hex)
        case _:
            made: S3Store = request.getfixturevalue("s3")
            return made


class TestObjectStores(ObjectStoreContract):
    """The object store contract, tested on every backend."""

    @pytest.fixture
    def store(self, store: ObjectStore) -> ObjectStore:
        return store


@pytest.mark.parametrize(
    "uri", ["s3://bucket/../other", "s3://..", "s3://bucket/a//b", "memory://a/../b", "memory://."]
)
def test_uri_with_parent_folders_is_refused(uri: str) -> None:
    """S3 services and proxies interpret a key with an empty part, "." or ".." in different ways."""
    with pytest.raises(ConfigError, match=r"store\.uri = .* has an empty, '\.' or '\.\.' part"):
        open_store(uri)


def test_store_is_reopened_by_its_uri(store: ObjectStore) -> None:
    store.put("a/b", b"x")
    assert open_store(store.uri).get("a/b") == b"x"
    assert open_store(store.child("a").uri).get("b") == b"x"
    assert open_store(store.uri) == store


# --- a local folder -----------------------------------------------------------------------------------------

RACER = """
import pathlib, sys, time
from rollflow.storage.errors import Conflict
from rollflow.storage.objects.local import LocalStore
root, me = pathlib.Path(sys.argv[1]), sys.argv[2]
store = LocalStore(root / "store")
(root / f"ready-{me}").touch()
while not (root / "go").exists():
    time.sleep(0.001)
for turn in range(50):
    try:
        store.create(f"turn/{turn:02d}", me.encode() * 1000)
    except Conflict:
        continue
    print(turn)
"""


def test_only_one_of_racing_processes_creates_an_object(tmp_path: Path, local: LocalStore) -> None:
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER, tmp_path, str(me)], stdout=subprocess.PIPE, text=True)
        for me in range(6)
    ]
    until(lambda: len(list(tmp_path.glob("ready-*"))) == len(racers))
    (tmp_path / "go").touch()
    won = {str(me): racer.communicate(timeout=HANG_SECONDS)[0].split() for me, racer in enumerate(racers)}
    assert [racer.returncode for racer in racers] == [0] * len(racers)
    assert sorted(int(turn) for turns in won.values() for turn in turns) == list(range(50))
    for me, turns in won.items():
        assert all(local.get(f"turn/{int(turn):02d}") == me.encode() * 1000 for turn in turns)


def test_one_of_racing_threads_creates_without_hard_link_support(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(local_backend.os, "link", unsupported)
    for turn in range(20):
        winners = race_to_create(local, f"{turn}", [b"%d" % writer for writer in range(8)])
        assert winners == [local.get(f"{turn}")]
    assert len(list(local.list())) == 20


def test_repeated_hard_link_request_counts_as_success(local: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(local_backend.os, "link", twice)
    local.create("a", b"x")
    with pytest.raises(Conflict):
        local.create("a", b"x")


def test_first_write_creates_the_folder(local: LocalStore) -> None:
    assert not local.exists("a")
    assert list(local.list()) == []
    assert not local.root.exists()
    local.put("a", b"x")
    assert local.local_path("a").read_bytes() == b"x"


def test_temporary_files_are_hidden_and_reserved(local: LocalStore) -> None:
    local.child("a").put("b", b"x")
    (local.root / ".tmp" / "left-by-a-killed-writer").write_bytes(b"half")
    (local.root / "a" / ".tmp").mkdir()
    (local.root / "a" / ".tmp" / "another").write_bytes(b"half")
    assert list(local.list()) == ["a/b"]
    with pytest.raises(ValueError, match="reserved"):
        local.put("a/.tmp/b", b"")


def test_store_check_deletes_files_of_killed_writers(local: LocalStore) -> None:
    local.put("a", b"x")
    old, new = local.root / ".tmp" / "old", local.root / ".tmp" / "new"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    local.check()
    assert new.exists()
    assert not old.exists()


def test_file_being_written_is_never_deleted(local: LocalStore) -> None:
    with local._write_temporary(split_buffers(b"half")) as (temporary, _):
        os.utime(temporary, (0, 0))
        [left] = local.list_unfinished()
        local.check()
        local.discard(left)
        assert temporary.exists()
    assert list(local.list_unfinished()) == []


@pytest.mark.usefixtures("real_syncs")
@pytest.mark.parametrize("size", [5, 3_000_000])
def test_file_is_synced_before_the_record_that_names_it(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """If a record exists after a power cut, the file that it names and all folders above the file also exist."""
    synced, fsync, link = set[Path](), os.fsync, os.link

    def noted_sync(descriptor: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def noted_link(source: Path, target: Path) -> None:
        assert synced >= {local.root / "b" / "file", local.root / "b", local.root, source}
        synced.clear()
        link(source, target)

    monkeypatch.setattr(local_backend.os, "fsync", noted_sync)
    monkeypatch.setattr(local_backend.os, "link", noted_link)
    local.create_naming("a/record", str.encode, "b/file", os.urandom(size))
    assert synced == {local.root / "a"}


def test_partial_write_to_disk_is_continued(local: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    writev = os.writev
    monkeypatch.setattr("os.writev", lambda file, parts: writev(file, [memoryview(b"".join(parts))[:100_000]]))
    data = [os.urandom(n % 7 * 1000) for n in range(2000)]
    assert local.put("a", data) == hashlib.sha256(b"".join(data)).hexdigest()
    assert local.get("a") == b"".join(data)


def test_same_bytes_are_written_without_sync_file_range(local: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_sync_file_range", None)
    data = os.urandom(20_000_000)
    assert local.put("a", data) == hashlib.sha256(data).hexdigest()
    assert local.get("a") == data


def test_failed_write_leaves_no_file(local: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(local_backend.os, "fsync", full)
        with pytest.raises(StoreFailed, match=r"No space left on device.*free space on the disk, then resume"):
            local.create("a", b"x")
    assert [path for path in local.root.rglob("*") if path.is_file()] == []


def test_error_names_a_store_folder_that_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = LocalStore(tmp_path / "file" / "store")
    with pytest.raises(
        ConfigError, match=r"store\.uri = '.*/file/store' cannot be written \(Not a directory\); name a"
    ):
        store.check()


# --- S3 -----------------------------------------------------------------------------------------------------


@pytest.fixture
def proxy(aws: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Start a proxy through which the stores of a test reach the server; the stores retry almost without a pause."""
    monkeypatch.setattr(s3_requests, "PATIENT", RetryLimits(tries=6, pause_seconds=0.01))
    monkeypatch.setattr(s3_requests, "PART_BYTES", 5 * 2**20)  # the smallest size of a part that S3 accepts
    with FaultyProxy(aws) as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", made.endpoint)
        yield made


@pytest.mark.parametrize("data", [b"", b"content"])
def test_create_succeeds_if_only_the_s3_response_was_lost(s3: S3Store, proxy: FaultyProxy, data: bytes) -> None:
    proxy.lose_answers("PUT", 1)
    s3.create("a", data)
    assert proxy.seen("PUT") == 2
    assert s3.get("a") == data


def test_create_succeeds_if_all_s3_responses_were_lost(s3: S3Store, proxy: FaultyProxy) -> None:
    proxy.lose_answers("PUT", 100)
    s3.create("a", b"content")
    assert s3.get("a") == b"content"


def test_create_reports_a_conflict_after_a_lost_s3_response(s3: S3Store, proxy: FaultyProxy) -> None:
    s3.create("a", b"same")
    proxy.lose_answers("PUT", 1)
    with pytest.raises(Conflict):
        s3.create("a", b"same")


def test_s3_without_response_is_unreachable_not_empty(s3: S3Store, proxy: FaultyProxy) -> None:
    proxy.lose_answers("GET", 100)
    with pytest.raises(Unreachable, match=r"did not answer a request for s3://contract/.*/a \(6 tries in \d+ s\)"):
        s3.get("a")


# faults that are tested in `make test` for objects that are read in parts
IN_PARTS = {Fault.LOST, Fault.TRUNCATED, Fault.FLIPPED}


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "fault"),
    [
        pytest.param(
            size,
            fault,
            marks=[pytest.mark.soak] if name == "parts" and fault not in IN_PARTS else [],
            id=f"{name}-{fault}",
        )
        for name, size in (("small", 5), ("parts", 11_000_000))
        for fault in Fault
        if fault is not Fault.STALLED
    ],
)
def test_network_fault_leaves_the_store_unchanged(
    s3: S3Store, proxy: FaultyProxy, fault: Fault, size: int, tmp_path: Path
) -> None:
    data, sha256 = os.urandom(size), []
    for method in ("PUT", "POST"):
        proxy.do(method, Fault.LOST if fault in (Fault.FLIPPED, Fault.ALTERED) else fault, 2)
    sha256.append(s3.put("a", data))
    with pytest.raises(Conflict):
        s3.create("a", data)
    s3.create("b", data)
    for path in ("a", "b"):
        proxy.do("GET", fault, 2)
        assert s3.get(path) == data
        proxy.do("GET", fault, 2)
        sha256.append(s3.fetch(path, tmp_path / path))
        assert (tmp_path / path).read_bytes() == data
    assert set(sha256) == {hashlib.sha256(data).hexdigest()}
    assert proxy.faults[fault] >= 4


@pytest.mark.long
def test_stalled_download_is_repeated(s3: S3Store, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.put("a", b"content")
    proxy.do("GET", Fault.STALLED)
    with monkeypatch.context() as patch:
        patch.setattr(s3_requests, "PATIENT", RetryLimits(tries=6, pause_seconds=0.01, try_seconds=2.0))
        assert s3.get("a") == b"content"
    assert proxy.seen("GET") >= 2


@pytest.mark.parametrize("fault", [Fault.FLIPPED, Fault.ALTERED])
def test_object_with_altered_bytes_is_corrupt(s3: S3Store, proxy: FaultyProxy, fault: Fault, tmp_path: Path) -> None:
    """A checksum is stored with each object, and every read compares the object's bytes with the checksum."""
    s3.put("a", b"content")
    proxy.do("GET", fault, 100)
    with pytest.raises(Corrupt, match=r"s3://contract/.*/a does not contain what was written"):
        s3.get("a")
    with pytest.raises(Corrupt, match="does not contain what was written"):
        s3.fetch("a", tmp_path / "copy")


@pytest.mark.long
def test_read_in_parts_never_mixes_two_versions_of_an_object(s3: S3Store) -> None:
    contents = [bytes([letter]) * 18_000_000 for letter in b"ab"]
    s3.put("a", contents[0])

    def write() -> None:
        for turn in range(4):
            s3.put("a", contents[turn % 2])

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write)
        while not writer.done():
            assert s3.get("a") in contents
        writer.result()


def test_listing_includes_all_pages_of_s3(s3: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "3")
    for number in range(10):
        s3.put(f"{number}", b"")
    assert [*s3.list()] == [f"{number}" for number in range(10)]


def test_large_object_is_created_once_by_multipart_upload(s3: S3Store) -> None:
    data = os.urandom(2 * PART_BYTES + 1)
    assert len(race_to_create(s3, "a", [data] * 3)) == 1
    assert s3.get("a") == data
    with pytest.raises(Conflict):
        s3.create("a", b"small")


def test_create_conflicts_with_objects_of_other_programs(s3: S3Store) -> None:
    folder = s3fs.S3FileSystem(skip_instance_cache=True)
    folder.pipe_file(f"{s3.root}/plain", b"x")
    folder.pipe_file(f"{s3.root}/drawn-by-a-console/", b"")
    with pytest.raises(Conflict):
        s3.create("plain", b"x")
    assert list(s3.list()) == ["plain"]
    s3.create("ours", b"x")
    assert len(folder.metadata(f"{s3.root}/ours")[WRITER]) == 32


def test_bucket_without_a_prefix_is_a_store(aws: str) -> None:
    bucket = uuid.uuid4().hex
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(bucket)
    store = S3Store(bucket)
    store.create("a/b", b"x")
    assert list(store.list()) == list(store.list("a")) == ["a/b"]
    store.check()


def test_forked_process_gets_its_own_connection(s3: S3Store) -> None:
    s3.put("a", b"parent")
    child = multiprocessing.get_context("fork").Process(
        target=alone, args=(lambda: s3.put("a", s3.get("a") + b" and child"),)
    )
    child.start()
    child.join(HANG_SECONDS)
    assert child.exitcode == 0
    assert s3.get("a") == b"parent and child"


def test_pickled_store_works_in_a_fresh_process(s3: S3Store) -> None:
    code = "import pickle, sys; pickle.load(sys.stdin.buffer).put('a', b'fresh')"
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(s3), check=True, timeout=HANG_SECONDS)
    assert s3.get("a") == b"fresh"


def test_store_check_names_a_missing_bucket(aws: str) -> None:
    with pytest.raises(ConfigError, match=r"store\.uri = 's3://nowhere/x' names a bucket that does not exist; create"):
        S3Store("nowhere/x").check()


def test_missing_bucket_is_not_a_missing_object(aws: str) -> None:
    for call in (lambda store: store.get("a"), lambda store: store.put("a", b""), lambda store: store.create("a", b"")):
        with pytest.raises(ConfigError, match="bucket that does not exist"):
            call(S3Store("nowhere/x"))


@pytest.mark.long
def test_store_check_names_an_unreachable_endpoint(aws: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with FaultyProxy(aws) as closed:
        pass
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", closed.endpoint)
    with pytest.raises(
        ConfigError, match=r"'s3://contract/x' cannot be reached .*127.0.0.1.*check AWS_ENDPOINT_URL_S3"
    ):
        S3Store("contract/x").check()


def test_store_check_names_a_timeout_without_a_message(s3: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(self: S3Store, name: str) -> None:
        raise TimeoutError

    monkeypatch.setattr(S3Store, "_probe", probe)
    with pytest.raises(ConfigError, match=r"cannot be reached \(TimeoutError\); check"):
        s3.check()


def test_store_check_does_not_wait_for_a_silent_endpoint(s3: S3Store, proxy: FaultyProxy) -> None:
    proxy.fall_silent()
    with pytest.raises(ConfigError, match="cannot be reached"):
        s3.check()
    assert proxy.seen("PUT") == 1


def test_store_check_names_denied_access(s3: S3Store, proxy: FaultyProxy) -> None:
    proxy.answer("PUT", 403, "AccessDenied")
    with pytest.raises(ConfigError, match=r"store\.uri = .* denies access .*; check AWS_PROFILE or AWS_ACCESS_KEY_ID"):
        s3.check()


def test_store_check_names_missing_credentials(s3: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nonexistent")
    with pytest.raises(ConfigError, match=r"cannot be used \(Unable to locate credentials\)"):
        s3.check()


def test_s3_service_without_conditional_writes_is_refused(s3: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put_object = moto.s3.responses.S3Response.put_object

    def unconditional(self: moto.s3.responses.S3Response) -> object:
        self.headers = {name: value for name, value in self.headers.items() if name != "If-None-Match"}
        return put_object(self)

    monkeypatch.setattr(moto.s3.responses.S3Response, "put_object", unconditional)
    with pytest.raises(ConfigError, match="ignores If-None-Match"):
        s3.check()
    assert list(s3.list()) == []


def test_memory_store_uri_without_a_name_is_refused() -> None:
    for uri in ("s3://", "memory://"):
        with pytest.raises(ConfigError, match=r"store\.uri = "):
            open_store(uri).check()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 9, 100])
@pytest.mark.parametrize("start", [0, 1, 5])
def test_first_missing_number_of_numbered_objects_is_found(count: int, start: int) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    for number in range(count):
        store.put(f"n/{number}", b"")
    expected = count if start < count else start
    assert first_missing(store, lambda n: f"n/{n}", start) == expected
