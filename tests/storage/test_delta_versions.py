"""Tests of policy versions whose weights are stored as deltas. Every reader gets the same bytes, and the audit finds
each fault. Pruning keeps all objects that are needed, at whatever moment a learner dies.
"""

from __future__ import annotations

import errno
import json
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.audit.audit import audit
from rollflow.storage.audit.garbage import list_orphans, store_clock
from rollflow.storage.deltas.changes import unsigned_type
from rollflow.storage.deltas.delta_file import MAGIC, encode_delta, read_delta
from rollflow.storage.deltas.elements import list_tensors
from rollflow.storage.deltas.parent import ParentWeights
from rollflow.storage.deltas.update_folder import list_changes
from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.log import rules
from rollflow.storage.log.entries import VersionPublished
from rollflow.storage.log.run_log import Log, Writer
from rollflow.storage.log.state import EntryRefused
from rollflow.storage.objects import ObjectStore
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.policies import PolicyStore, PolicyVersion
from rollflow.storage.records import DELTA, StoredObject
from rollflow.tasks.learners.checkpoint.sharded_files import stage_weights
from tests.support.batches import begin, learning, scheduling, staged
from tests.support.delta_weights import DriftingWeights, publish_weights, restored_parent, train_weights

Files = Mapping[str, bytes]


def trained(run: ObjectStore, versions: int, full_every: int, **kept: int) -> tuple[PolicyStore, list[Files]]:
    """Publish policy versions, and return the files of each version."""
    begin(run, full_every=full_every, **kept)
    policies, writer = learning(run)
    return policies, [*train_weights(policies, writer, DriftingWeights(), ParentWeights(full_every), versions)]


def names(folder: Path) -> dict[str, bytes]:
    return {f"weights/{file.name}": file.read_bytes() for file in folder.iterdir() if file.is_file()}


def check_readers(run: ObjectStore, number: int, files: Files, folder: Path) -> None:
    """Read a version's weights by each method of the policy store, and compare the bytes with `files`."""
    policies = PolicyStore(Log(run))
    version = policies.find(number)
    policies.check_kept(version)
    assert policies.has_weights(version)
    assert {stored.path.split("/", 3)[3]: bytes(policies.read(stored)) for stored in version.weights} == files
    places = [folder / uuid.uuid4().hex for _ in range(2)]
    for place in places:
        place.mkdir(parents=True)
    assert {s.path.split("/", 3)[3]: policies.file(s, places[0]).read_bytes() for s in version.weights} == files
    policies.copy_weights(version, places[1])
    assert names(places[1]) == files
    assert names(policies.weights_folder(version, folder / "cache")) == files


@pytest.mark.parametrize("full_every", [1, 2, 4, 100])
def test_every_reader_gets_the_published_bytes(run: ObjectStore, tmp_path: Path, full_every: int) -> None:
    policies, made = trained(run, 10, full_every, keep_last=100)
    for number, files in enumerate(made):
        check_readers(run, number, files, tmp_path)
        version = policies.find(number)
        assert bool(version.deltas) == (number % full_every != 0)
        assert policies.store.exists(version.weights[0].path) == (number % full_every == 0)
    report = audit(run, deep=True)
    assert report.violations == []
    assert list_orphans(run, now=store_clock(run) + 1e9) == []


def test_deltas_are_much_smaller_than_the_weights(run: ObjectStore) -> None:
    policies, _ = trained(run, 2, 10)
    version = policies.find(1)
    assert sum(stored.size for stored in version.stored_weights) < sum(stored.size for stored in version.weights) / 8


def test_log_entry_without_deltas_has_no_deltas_field(memory: MemoryStore) -> None:
    trained(memory, 2, 1)
    assert not any(b"deltas" in memory.get(path) for path in memory.list("log"))
    trained(other := MemoryStore(uuid.uuid4().hex), 2, 2)
    assert any(b'"deltas"' in other.get(path) for path in other.list("log"))


def test_file_in_which_all_elements_changed_is_stored_whole(run: ObjectStore, tmp_path: Path) -> None:
    """The next version may again be stored as a delta to the whole file."""
    begin(run, full_every=10)
    (policies, writer), (batches, scheduler) = learning(run), scheduling(run)
    weights, parent, made = DriftingWeights(), ParentWeights(10), []
    for number, far in enumerate((False, False, True, False)):
        if number:
            batches.commit(scheduler, staged(number - 1, number - 1))
            weights.move(far=far)
        policies.newest()
        publish_weights(policies, writer, weights.files, parent, number)
        made.append(weights.files)
    assert [len(policies.find(number).deltas) for number in range(4)] == [0, 2, 1, 2]
    for number, files in enumerate(made):
        check_readers(run, number, files, tmp_path)
    assert audit(run, deep=True).clean


def test_learner_that_restarts_continues_with_deltas(run: ObjectStore, tmp_path: Path) -> None:
    begin(run, full_every=4)
    weights, made = DriftingWeights(), []
    for _ in range(6):
        policies, writer = learning(run)
        made += train_weights(policies, writer, weights, restored_parent(policies), 1)
    assert [bool(policies.find(number).deltas) for number in range(6)] == [False, True, True, True, False, True]
    for number, files in enumerate(made):
        check_readers(run, number, files, tmp_path)


def test_copy_that_differs_from_published_weights_is_not_used(run: ObjectStore) -> None:
    policies, made = trained(run, 1, 4)
    parent = ParentWeights(4)
    wrong = {name: data[:-1] + b"?" for name, data in made[0].items()}
    parent.take(0, wrong, {stored.path.split("/", 3)[3]: stored for stored in policies.find(0).weights})
    policies, writer = learning(run)
    train_weights(policies, writer, DriftingWeights(), parent, 1)
    assert policies.find(1).deltas == ()


def test_version_after_a_failed_upload_is_stored_whole(memory: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an upload that failed half-way, the learner's copies may contain the weights of either version."""
    begin(memory, full_every=10)
    policies, writer = learning(memory)
    weights, parent = DriftingWeights(), ParentWeights(10)
    train_weights(policies, writer, weights, parent, 2)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "put", lambda *given: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            stage_weights(policies, writer, 2, weights.files, parent)
    made = train_weights(policies, writer, weights, parent, 1)
    assert policies.find(2).deltas == ()
    assert {s.path.split("/", 3)[3]: bytes(policies.read(s)) for s in policies.find(2).weights} == made[0]


RULES = st.fixed_dictionaries(
    {
        "keep_last": st.integers(1, 5),
        "keep_every": st.integers(1, 9),
        "state_every": st.integers(1, 5),
        "full_every": st.integers(1, 7),
    }
)
EVENTS = st.lists(
    st.sampled_from(["train", "train", "prune", "prune half-way", "restart", "restart blank", "killed", "collect"]),
    max_size=30,
)


class Lives:
    """A run whose learners are killed at any point."""

    def __init__(self, rules: Mapping[str, int]) -> None:
        self.run = MemoryStore(uuid.uuid4().hex)
        begin(self.run, **rules)
        self.weights, self.made = DriftingWeights(share=0.05), list[Files]()
        self.restart()

    def restart(self, *, blank: bool = False) -> None:
        """Start another learner; if `blank` is true, the new learner has no copy of the parent's weights."""
        self.policies, self.writer = learning(self.run)
        self.parent = ParentWeights(self.policies.retention.full_every) if blank else restored_parent(self.policies)

    def train(self) -> None:
        """Publish the next version."""
        self.made += train_weights(self.policies, self.writer, self.weights, self.parent, 1)

    def kill(self) -> None:
        """Store the objects of the next version, and die before the log entry is appended."""
        other = DriftingWeights(seed=len(self.made), share=0.3)
        stage_weights(self.policies, self.writer, self.policies.newest() + 1, other.files, self.parent)
        self.restart()

    def prune(self, *, half_way: bool = False) -> None:
        """Prune old versions; if `half_way` is true, die before all objects are deleted."""
        with pytest.MonkeyPatch.context() as patch:
            if half_way:
                patch.setattr(MemoryStore, "delete", lambda *of: None)
            self.policies.prune(self.writer)

    def act(self, event: str) -> None:
        """Carry out the event of this name."""
        events: Mapping[str, Callable[[], None]] = {
            "train": self.train,
            "prune": self.prune,
            "prune half-way": lambda: self.prune(half_way=True),
            "restart": self.restart,
            "restart blank": lambda: self.restart(blank=True),
            "killed": self.kill,
            "collect": self.collect,
        }
        events[event]()

    def collect(self) -> None:
        """Remove all garbage, as `rollflow gc` does."""
        for orphan in list_orphans(self.run, now=store_clock(self.run) + 1e9):
            self.run.delete(orphan.path)

    def check(self) -> None:
        """Check that each needed version can be read, and that the audit finds no violation."""
        policies, newest = PolicyStore(Log(self.run)), len(self.made) - 1
        for number, files in enumerate(self.made):
            version = policies.find(number)
            if policies.retention.is_needed("weights", number, newest):
                policies.check_kept(version)
                assert {s.path.split("/", 3)[3]: bytes(policies.read(s)) for s in version.weights} == files
        assert audit(self.run, deep=True).violations == []
        assert audit(self.run).violations == []


@pytest.mark.long
@given(RULES, EVENTS)
@settings(deadline=None, max_examples=40)
def test_needed_versions_can_be_rebuilt_whenever_a_learner_dies(rules: dict[str, int], events: list[str]) -> None:
    """Versions may be pruned and learners may die at any time."""
    lives = Lives(rules)
    for event in events:
        lives.act(event)
    lives.check()


def test_version_in_use_keeps_the_weights_it_is_rebuilt_from(memory: MemoryStore, tmp_path: Path) -> None:
    begin(memory, full_every=4, keep_last=1, keep_every=100)
    policies, writer = learning(memory)
    made = train_weights(policies, writer, DriftingWeights(), ParentWeights(4), 14)
    PolicyStore(policies.log, in_use=lambda version: version == 6).prune(writer)
    check_readers(memory, 6, made[6], tmp_path)
    policies.prune(writer)
    with pytest.raises(Missing, match=r"or an object from which it is rebuilt"):
        policies.check_kept(policies.find(6))


# --- the cache of a machine ---------------------------------------------------------------------------------


def test_machine_fetches_each_delta_once(memory: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of a version is built from the folder of an earlier version, which need not be the previous one."""
    _, made = trained(memory, 9, 100, keep_last=100)
    read: list[str] = []
    get = MemoryStore.get
    monkeypatch.setattr(MemoryStore, "get", lambda s, path: (read.append(path), get(s, path))[1])
    policies = PolicyStore(Log(memory))
    for number in (asked := (0, 1, 2, 5, 6, 8)):
        folder = policies.weights_folder(policies.find(number), tmp_path)
        assert names(folder) == made[number]
    fetched = sorted(path for path in read if path.startswith("policies/"))
    wanted = {number: policies.find(number).stored_weights for number in range(9)}
    stored = [o.path for n, objects in wanted.items() for o in objects if n in asked or o.path.endswith(DELTA)]
    assert fetched == sorted(stored)


def bits_of(files: Files) -> dict[str, np.ndarray]:
    """Return the bits of all tensors of a version's files."""
    found = dict[str, np.ndarray]()
    for name, data in files.items():
        for place in list_tensors(memoryview(data)) if name.endswith(".safetensors") else ():
            count = (place.end - place.start) // place.width
            found[place.name] = np.frombuffer(data, unsigned_type(place.width), count, place.start)
    return found


def test_changes_of_a_folder_turn_older_versions_into_its_own(run: ObjectStore, tmp_path: Path) -> None:
    """The folder has the changes since each version after the newest full version, and since the full version."""
    policies, made = trained(run, 8, 4, keep_last=100)
    folder = policies.weights_folder(policies.find(7), tmp_path)
    for before in range(7):
        changes = list_changes(folder, before, 7)
        assert (changes is not None) == (before >= 4)
        if changes is None:
            continue
        found, new = ({name: bits.copy() for name, bits in bits_of(made[number]).items()} for number in (before, 7))
        for one in changes:
            if one.replaces:
                found[one.name][one.positions] = one.numbers
            else:
                found[one.name][one.positions] += one.numbers
        assert found.keys() == new.keys()
        assert all(np.array_equal(found[name], new[name]) for name in new)


def test_changes_by_deltas_that_do_not_fit_are_refused(run: ObjectStore, tmp_path: Path) -> None:
    """Each delta is intact. An engine would add its numbers to the wrong bits."""
    policies, _ = trained(run, 8, 4, keep_last=100)
    folder = policies.weights_folder(policies.find(7), tmp_path)
    file = min(folder.glob("*.safetensors"))
    five, six = (folder / f"deltas/{number:08d}/{file.name}.delta" for number in (5, 6))
    six.unlink()
    six.write_bytes(five.read_bytes())
    with pytest.raises(ValueError, match=r"^the delta .*00000006.* does not fit the delta before it"):
        list(list_changes(folder, 4, 7) or ())
    with open(file, "ab") as longer:
        longer.write(b"x")
    with pytest.raises(ValueError, match=r"^the delta .*00000007.* does not fit .* the weight file model"):
        list(list_changes(folder, 6, 7) or ())


def test_damaged_cached_weights_are_not_used_for_a_rebuild(memory: MemoryStore, tmp_path: Path) -> None:
    """The cached files are not checked again, but a file that is rebuilt from them is. If it is wrong, the stored
    objects are used.
    """
    policies, made = trained(memory, 3, 10)
    folder = policies.weights_folder(policies.find(1), tmp_path)
    data = bytearray((folder / "model-2.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model-2.safetensors").write_bytes(data)
    assert names(policies.weights_folder(policies.find(2), tmp_path)) == made[2]


# --- faults that the audit finds ------------------------------------------------------------------------------


def first_delta(policies: PolicyStore, number: int) -> StoredObject:
    return policies.find(number).deltas[0]


def flip(run: ObjectStore, path: str) -> None:
    data = bytearray(run.get(path))
    data[-1] ^= 1
    run.put(path, bytes(data))


FAULTS: Mapping[str, Callable[[ObjectStore, PolicyStore], object]] = {
    "a missing full version": lambda run, policies: run.delete(policies.find(4).weights[0].path),
    "a changed full version": lambda run, policies: flip(run, policies.find(4).weights[0].path),
    "a missing delta": lambda run, policies: run.delete(first_delta(policies, 5).path),
    "a changed delta": lambda run, policies: flip(run, first_delta(policies, 5).path),
    "another version's delta": lambda run, policies: run.put(
        first_delta(policies, 6).path, run.get(first_delta(policies, 5).path)
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_audit_finds_a_version_that_cannot_be_rebuilt(run: ObjectStore, fault: str) -> None:
    policies, _ = trained(run, 8, 4, keep_last=100)
    assert audit(run, deep=True).clean
    FAULTS[fault](run, policies)
    violations = audit(run, deep=True).violations
    assert {violation.kind for violation in violations} <= {"missing", "altered"}
    assert violations
    with pytest.raises(Corrupt):
        policies.read(policies.find(7).weights[0])


def publish_forged(
    run: ObjectStore, change: Callable[[VersionPublished, PolicyStore, Writer], VersionPublished]
) -> PolicyVersion:
    """Publish version 2 with a changed log entry, which a faulty or hostile learner wrote."""
    policies, made = trained(run, 2, 10)
    policies, writer = learning(run)
    batches, scheduler = scheduling(run)
    batches.commit(scheduler, staged(1, 1))
    policies.newest()
    stored = stage_weights(policies, writer, 2, made[1], restored_parent(policies))
    batch = policies.log.state.waiting[1].entry
    state = policies.stage(writer, 2, {"learner/state.safetensors": b"state"})
    body = VersionPublished(2, batch, stored.weights, state, deltas=stored.deltas)
    return policies.publish(writer, change(body, policies, writer))


def test_audit_finds_a_delta_to_another_parent(run: ObjectStore) -> None:
    """The delta is intact, and the log names its hash, but the delta is the difference to another file."""

    def wrong(body: VersionPublished, policies: PolicyStore, writer: Writer) -> VersionPublished:
        old = bytes(policies.read(policies.find(0).weights[0]))
        made = encode_delta(memoryview(bytearray(old)), policies.find(0).weights[0].sha256, [memoryview(old)])
        assert made is not None
        sha256 = policies.store.put(body.deltas[0].path, made[1])
        delta = StoredObject(body.deltas[0].path, len(made[1]), sha256)
        return replace(body, deltas=(delta, *body.deltas[1:]))

    publish_forged(run, wrong)
    [violation] = audit(run, deep=True).violations
    assert violation.kind == "altered"
    assert "is not the difference from policies/00000001" in violation.what


def test_audit_finds_a_delta_to_a_missing_file(run: ObjectStore) -> None:
    def wrong(body: VersionPublished, policies: PolicyStore, writer: Writer) -> VersionPublished:
        prefix = f"policies/00000002/{writer.claim}/weights/other"
        data = policies.store.get(body.deltas[0].path)
        delta = StoredObject(prefix + DELTA, len(data), policies.store.put(prefix + DELTA, data))
        file = replace(body.weights[0], path=prefix)
        return replace(body, weights=(*body.weights, file), deltas=(*body.deltas, delta))

    version = publish_forged(run, wrong)
    assert [violation.kind for violation in audit(run, deep=True).violations] == ["lineage"]
    with pytest.raises(Corrupt, match="but this version has no such file"):
        PolicyStore(Log(run)).read(version.weights[-1])


def test_delta_with_a_valid_hash_but_wrong_gaps_is_corrupt(run: ObjectStore, tmp_path: Path) -> None:
    """The log names the hash of the faulty delta, so only the delta's content reveals the fault."""

    def wrong(body: VersionPublished, policies: PolicyStore, writer: Writer) -> VersionPublished:
        data = bytes(policies.store.get(policies.find(1).deltas[0].path))
        begin, size = len(MAGIC) + 8, int.from_bytes(data[len(MAGIC) : len(MAGIC) + 8], "little")
        header = json.loads(data[begin : begin + size])
        header["chunks"][-1][3] -= 1  # the header now states fewer changed elements than there are gaps
        head = json.dumps(header).encode()
        forged = MAGIC + len(head).to_bytes(8, "little") + head + data[begin + size :]
        path = body.deltas[0].path
        return replace(
            body, deltas=(StoredObject(path, len(forged), policies.store.put(path, forged)), *body.deltas[1:])
        )

    version = publish_forged(run, wrong)
    policies = PolicyStore(Log(run))
    with pytest.raises(Corrupt, match=r"\.delta cannot be applied to the file of the version before: "):
        policies.read(version.weights[0])
    with pytest.raises(Corrupt, match=r"\.delta cannot be applied to the file of the version before: "):
        policies.weights_folder(version, tmp_path)


def test_version_with_a_truncated_whole_file_is_corrupt(tmp_path: Path) -> None:
    """An empty file cannot be memory-mapped."""
    policies, made = trained(LocalStore(tmp_path / "run"), 3, 4)
    whole = policies.store.local_path(policies.find(0).weights[0].path)
    assert whole is not None
    for size in (0, 100):
        whole.write_bytes(made[0]["weights/model-1.safetensors"][:size])
        for number in (0, 2):
            with pytest.raises(Corrupt):
                policies.weights_folder(policies.find(number), tmp_path / "cache")
        with pytest.raises(Corrupt, match=f"model-1.safetensors has {size} bytes, but must have"):
            policies.read(policies.find(2).weights[0])


def test_cache_makes_room_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk is full, unused folders are removed, and the file is rebuilt again."""
    policies, made = trained(LocalStore(tmp_path / "run"), 4, 4, keep_last=100)
    cache, copy = tmp_path / "cache", shutil.copyfile
    policies.weights_folder(policies.find(1), cache)
    [unused] = cache.glob("*/00000001-*")
    policies = PolicyStore(policies.log)

    def copied(source: Path, target: Path) -> Path:
        if unused.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", copied)
    monkeypatch.setattr(PolicyStore, "_find_cached", lambda *given: None)  # no earlier folder is found in the cache
    assert names(policies.weights_folder(policies.find(3), cache)) == made[3]


def test_delta_without_a_weight_file_is_refused(run: ObjectStore) -> None:
    def wrong(body: VersionPublished, policies: PolicyStore, writer: Writer) -> VersionPublished:
        return replace(body, deltas=(replace(body.deltas[0], path="policies/00000002/1/weights/x.delta"),))

    with pytest.raises(EntryRefused, match="version 2 has a delta without a weight file"):
        publish_forged(run, wrong)


def test_delta_chain_longer_than_full_every_is_refused(run: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain is too long because a version that must be stored whole is stored as deltas. The audit also reports the
    log entry.
    """
    policies, _ = trained(run, 4, 4)
    policies, writer = learning(run)
    parent = restored_parent(policies)
    parent.full_every = 100
    with pytest.raises(EntryRefused, match=r"version 4 must store its weights whole, because store\.full_every"):
        train_weights(policies, writer, DriftingWeights(), parent, 1)
    policies, writer = learning(run)
    parent = restored_parent(policies)
    parent.full_every = 100
    monkeypatch.setattr(rules, "_check_deltas", lambda state, body: None)
    policies.newest()
    publish_weights(policies, writer, DriftingWeights().files, parent, 4)
    monkeypatch.undo()
    violations = audit(run, deep=True).violations
    assert any("must store its weights whole" in violation.what for violation in violations)


def test_audit_rebuilds_weights_from_before_its_first_entry(run: ObjectStore) -> None:
    """The delta chain of a new version begins with a version that an earlier audit has checked."""
    policies, _ = trained(run, 6, 100, keep_last=100)
    assert audit(run).clean
    policies, writer = learning(run)
    train_weights(policies, writer, DriftingWeights(), restored_parent(policies), 2)
    assert audit(run).clean
    train_weights(policies, writer, DriftingWeights(), restored_parent(policies), 1)
    flip(run, policies.find(0).weights[0].path)
    assert [violation.kind for violation in audit(run).violations] == ["altered"]


def test_whole_file_replaces_a_damaged_delta(run: ObjectStore, tmp_path: Path) -> None:
    """A replay has computed a weight file, and the learner stores the whole file again. Readers and the audit accept
    the file.
    """
    policies, made = trained(run, 8, 4, keep_last=100)
    flip(run, first_delta(policies, 6).path)
    assert not audit(run, deep=True).clean
    stored = next(s for s in policies.find(6).weights if s.path + DELTA == first_delta(policies, 6).path)
    run.put(stored.path, made[6][stored.path.split("/", 3)[3]])
    check_readers(run, 6, made[6], tmp_path)
    assert audit(run, deep=True).clean


@pytest.mark.parametrize("lost", [False, True])
def test_versions_after_a_replaced_delta_can_be_read(run: ObjectStore, tmp_path: Path, lost: bool) -> None:
    """The chain of a later version begins with the whole file that replaced the delta. If this file is damaged, too,
    reading fails.
    """
    policies, made = trained(run, 6, 100, keep_last=100)
    delta = first_delta(policies, 3)
    run.put(delta.path.removesuffix(DELTA), made[3][delta.path.split("/", 3)[3].removesuffix(DELTA)])
    run.delete(delta.path) if lost else flip(run, delta.path)
    for number in (2, 3, 4, 5):
        check_readers(run, number, made[number], tmp_path / str(number))
    flip(run, delta.path.removesuffix(DELTA))
    with pytest.raises(Corrupt, match=r"00000003/.*\.delta (is missing|does not have)"):
        policies.read(policies.find(5).weights[0])


def test_delta_header_names_both_files(run: ObjectStore) -> None:
    policies, _ = trained(run, 2, 4)
    versions = [policies.find(number) for number in range(2)]
    for old, new, delta in zip(versions[0].weights, versions[1].weights, versions[1].deltas, strict=False):
        header = read_delta(memoryview(run.get(delta.path)))
        assert (header.parent, header.result, header.size) == (old.sha256, new.sha256, new.size)
