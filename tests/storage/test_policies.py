"""Tests of the policy store's guarantees for publishing and pruning, on every object store that needs no server."""

from __future__ import annotations

import tempfile
import uuid
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.audit.garbage import list_orphans, store_clock
from rollflow.storage.errors import Conflict, Corrupt, Missing
from rollflow.storage.log.entries import Pruned, entry_path
from rollflow.storage.log.retention import KINDS, Kind, Retention
from rollflow.storage.log.run_log import Log
from rollflow.storage.log.state import Deposed, EntryRefused
from rollflow.storage.objects import ObjectStore
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.policies import PolicyStore
from tests.support.batches import begin, file_of, learning, publish, ready, scheduling, staged, train
from tests.support.log_runs import of_kind
from tests.support.together import together


def test_only_one_of_two_learners_publishes_a_version(run: ObjectStore) -> None:
    """Two learners race for every version: exactly one publishes it, and the entry names that learner's objects."""
    batches, scheduler = ready(run)
    for version in range(1, 21):
        batches.find_waiting(version - 1)
        batches.commit(scheduler, staged(version - 1, version - 1))
        losses: list[int] = []

        def race(version: int = version, losses: list[int] = losses) -> None:
            policies, writer = learning(run)
            try:
                publish(policies, writer, version)
            except (Conflict, KeyError):  # the learner was deposed or refused, or the batch was already trained on
                losses.append(writer.claim)

        together(race, race)
        assert len(losses) == 1
        policies = PolicyStore(Log(run))
        found = policies.find(version)
        assert found.claim not in losses
        assert policies.read(found.weights[0]) == f"{version} by {found.claim}".encode()
        waited = batches.read_commit(found.batch_entry or 0)
        assert waited.number == version - 1


def test_published_policy_version_is_found(run: ObjectStore) -> None:
    begin(run)
    policies, writer = train(run, 3)
    other = PolicyStore(Log(run))
    for version in range(3):
        found = other.find(version)
        assert (found.number, found.claim) == (version, writer.claim)
        assert found.objects == (*found.weights, *found.state)
        paths = [f"policies/{version:08d}/{writer.claim}/{name}" for name in ("weights/model", "learner/state")]
        assert [stored.path for stored in found.objects] == [f"{path}.safetensors" for path in paths]
        assert [len(other.read(stored)) for stored in found.objects] == [stored.size for stored in found.objects]
    assert (other.newest(), other.retention) == (2, policies.retention)
    for version in (-1, 3):
        with pytest.raises(Missing, match=f"has no version {version}; its newest version is 2"):
            other.find(version)


def test_policy_versions_from_a_number_on_are_listed_in_order(run: ObjectStore) -> None:
    begin(run)
    policies, _ = train(run, 4)
    for first in range(6):
        assert [version.number for version in policies.since(first)] == list(range(first, 4))
    assert list(policies.since(2)) == [policies.find(2), policies.find(3)]


def test_policy_version_published_meanwhile_is_found(run: ObjectStore) -> None:
    begin(run)
    train(run, 1)
    early, late = PolicyStore(Log(run)), PolicyStore(Log(run))
    train(run, 1)
    assert (early.newest(), early.find(1).number) == (1, 1)
    assert late.find(1).number == 1


def test_policy_version_of_a_voided_batch_is_refused(run: ObjectStore) -> None:
    batches, writer = ready(run)
    batches.commit(writer, staged())
    policies, learner = learning(run)
    policies.newest()
    run.delete(file_of(batches, 0).path)
    batches.void(writer, 0, "gone")
    with pytest.raises(EntryRefused, match="version 1 names another batch than the one it must be trained on"):
        publish(policies, learner, 1)
    assert policies.newest() == 0


def present(policies: PolicyStore) -> dict[Kind, set[int]]:
    """Return, by kind, the versions whose objects are all in storage. Check that the other versions have no object."""
    found: dict[Kind, set[int]] = {kind: set() for kind in KINDS}
    for number in range(policies.newest() + 1):
        version = policies.find(number)
        for kind, objects in zip(KINDS, (version.weights, version.state), strict=True):
            there = {policies.store.exists(stored.path) for stored in objects}
            assert len(there) <= 1
            found[kind] |= {number} if there == {True} else set()
    return found


def required(rules: Retention, latest: int) -> dict[Kind, set[int]]:
    """Return the versions that must be kept by definition: the versions that the rules keep, the newest, version 0, and
    all bases (versions from which a replay starts).
    """
    versions = range(latest + 1)
    kept = {v for v in versions if v > latest - rules.keep_last or v % rules.keep_every == 0}
    bases = {max(range(0, v, rules.state_every)) for v in kept if v}
    states = bases | {0, latest}
    return {"weights": kept | states, "state": {v for v in states if v % rules.state_every == 0}}


RULES = st.fixed_dictionaries(
    {"keep_last": st.integers(1, 6), "keep_every": st.integers(1, 7), "state_every": st.integers(1, 6)}
)


@pytest.mark.long
@given(RULES, st.integers(1, 20))
@settings(deadline=None, max_examples=50)
def test_prune_keeps_exactly_the_needed_objects(rules: dict[str, int], versions: int) -> None:
    """After each published version, storage contains exactly the needed objects."""
    run = MemoryStore(uuid.uuid4().hex)
    begin(run, **rules)
    (batches, scheduler), (policies, learner) = scheduling(run), learning(run)
    for latest in range(versions):
        if latest:
            batches.find_waiting(latest - 1)
            batches.commit(scheduler, staged(latest - 1, latest - 1))
        publish(policies, learner)
        policies.prune(learner)
        assert present(policies) == required(Retention(**rules), latest)


def test_retention_matches_a_hand_calculation(run: ObjectStore) -> None:
    begin(run, keep_last=3, keep_every=4)
    policies, _ = train(run, 11, prune=True)
    found = present(policies)
    assert found["weights"] == {0, 3, 4, 7, 8, 9, 10}  # each kept version, and its base
    assert found["state"] == {0, 3, 7, 8, 9, 10}
    assert all(policies.find(version).number == version for version in range(11))


def test_prune_appends_its_entry_before_deleting(memory: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(memory, keep_last=1, keep_every=100)
    policies, writer = train(memory, 4)
    named: list[bool] = []
    delete = MemoryStore.delete
    monkeypatch.setattr(
        MemoryStore,
        "delete",
        lambda self, path: (named.append(bool(of_kind(self, Pruned))), delete(self, path))[1],
    )
    assert policies.prune(writer) == ((1, "weights"), (1, "state"))
    assert named == [True, True]
    assert policies.prune(writer) == ()
    assert len(of_kind(memory, Pruned)) == 1


def test_policy_version_under_evaluation_is_not_deleted(memory: MemoryStore) -> None:
    """A learner that is started during the evaluation must not prune the version, either."""
    begin(memory, keep_last=2, keep_every=100)
    train(memory, 8)
    evaluated = False
    policies, writer = learning(memory)
    policies = PolicyStore(policies.log, in_use=lambda version: version == 3 and not evaluated)
    policies.prune(writer)
    # an evaluation needs no learner state
    assert present(policies) == {"weights": {0, 3, 5, 6, 7}, "state": {0, 5, 6, 7}}
    assert policies.prune(writer) == ()
    evaluated = True
    assert policies.prune(writer) == ((3, "weights"),)
    assert present(policies)["weights"] == {0, 5, 6, 7}


def test_evaluated_policy_version_is_deleted_at_the_runs_end(run: ObjectStore) -> None:
    """The supervisor prunes, because the learner has already ended."""
    begin(run, keep_last=1, keep_every=100)
    policies, learner = train(run, 6)
    PolicyStore(policies.log, in_use=lambda version: True).prune(learner)
    assert present(policies) == {"weights": {0, 1, 2, 3, 4, 5}, "state": {0, 4, 5}}
    log = Log(run)
    supervisor = log.claim("supervisor")
    released = tuple((version, "weights") for version in (1, 2, 3))
    assert PolicyStore(log).prune(supervisor) == released
    assert present(policies) == required(policies.retention, 5)
    pruned = of_kind(run, Pruned)[-1]
    assert (pruned.role, pruned.body) == ("supervisor", Pruned(released))
    assert list_orphans(run, now=store_clock(run) + 1e9) == []


def test_prune_asks_once_whether_each_version_is_in_use(memory: MemoryStore) -> None:
    """Each call of `in_use` makes requests to the store, for which the learner waits."""
    begin(memory, keep_last=1, keep_every=100)
    _, writer = train(memory, 8)
    asked: list[int] = []

    def in_use(version: int) -> bool:
        asked.append(version)
        return True

    policies = PolicyStore(writer.log, in_use)
    assert policies.prune(writer) == tuple((version, "state") for version in range(1, 6))
    assert sorted(asked) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("damage", [b"rotten", None], ids=["damaged", "missing"])
def test_unreadable_log_entry_does_not_block_other_deletions(memory: MemoryStore, damage: bytes | None) -> None:
    """The objects of the unreadable entry are kept until the entry can be read again."""
    begin(memory, keep_last=1, keep_every=100)
    policies, writer = train(memory, 8)
    path = entry_path(policies.find(3).entry)
    whole = memory.get(path)
    if damage is None:
        memory.delete(path)
    else:
        memory.put(path, damage)
    others = tuple((version, kind) for version in (1, 2, 4, 5) for kind in KINDS)
    assert policies.prune(writer) == others
    assert policies.prune(writer) == ()
    memory.put(path, whole)
    assert present(policies) == {"weights": {0, 3, 6, 7}, "state": {0, 3, 6, 7}}
    assert policies.prune(writer) == ((3, "weights"), (3, "state"))
    assert present(policies) == required(policies.retention, 7)


def test_replaced_learner_deletes_no_object(run: ObjectStore) -> None:
    begin(run, keep_last=1, keep_every=100)
    policies, writer = train(run, 4)
    learning(run)
    with pytest.raises(Deposed):
        policies.prune(writer)
    assert present(policies)["weights"] == {0, 1, 2, 3}


def test_weights_folder_contains_local_files_of_the_weights(run: ObjectStore, tmp_path: Path) -> None:
    begin(run)
    policies, writer = train(run, 1)
    version = policies.find(0)
    folder = policies.weights_folder(version, tmp_path / "cache")
    assert (folder / "model.safetensors").read_bytes() == f"0 by {writer.claim}".encode()
    assert [file.name for file in folder.iterdir()] == ["model.safetensors"]
    policies.check_kept(version)
    run.delete(version.weights[0].path)
    with pytest.raises(Missing, match=f"the object {version.weights[0].path} is missing"):
        policies.check_kept(version)


def test_cache_of_fetched_weights_keeps_few_versions(memory: MemoryStore, tmp_path: Path) -> None:
    begin(memory)
    policies, _ = train(memory, 8)
    for version in range(8):
        folder = policies.weights_folder(policies.find(version), tmp_path)
        assert (folder / "model.safetensors").exists()
    assert [f.name[:8] for f in sorted(tmp_path.glob("*/[0-9]*"))] == ["00000005", "00000006", "00000007"]


def test_altered_weights_are_refused_on_download(run: ObjectStore, tmp_path: Path) -> None:
    begin(run)
    policies, _ = train(run, 1)
    stored = policies.find(0).weights[0]
    ways = policies.read, lambda stored: policies.file(stored, Path(tempfile.mkdtemp(dir=tmp_path)))
    for read in ways:
        run.put(stored.path, b"other")
        with pytest.raises(Corrupt, match="does not have the content that its log entry names"):
            read(stored)
        run.delete(stored.path)
        with pytest.raises(Corrupt, match="is missing"):
            read(stored)
