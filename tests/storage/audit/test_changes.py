"""Tests audits of runs whose config was changed: each log entry is audited against the config that applied to it, and a
forged change is found.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.audit.audit import audit
from rollflow.storage.audit.garbage import list_orphans
from rollflow.storage.log.configs import RecordedConfig, readable_configs, recorded_configs
from rollflow.storage.log.entries import BatchCommitted, ConfigChanged, VersionPublished, entry_path
from rollflow.storage.log.run_log import Log
from rollflow.storage.log.state import EntryRefused
from rollflow.storage.objects.memory import MemoryStore
from tests.support.counts import examples
from tests.support.log_actors import Learner, Supervisor
from tests.support.log_runs import Actors, RealScheduler, changed, of_kind, read, rewritten, sha256_of


def changed_run(alpha: float = 2.0, count: int = 3, /, **given: Any) -> tuple[MemoryStore, Actors]:
    """Create a run of `count` versions under one config, and `count` more versions under another."""
    store = MemoryStore(uuid.uuid4().hex)
    actors = Actors.begin(store, alpha, versions=9)
    actors.train(count)
    return store, resumed(store, **given).train(count)


def resumed(store: MemoryStore, /, **given: Any) -> Actors:
    """Let another supervisor change the config and restart the roles."""
    supervisor = Supervisor(store)
    supervisor.change(**given)
    claim = supervisor.writer.claim
    return Actors(supervisor, RealScheduler(store, claim), Learner(store, claim))


def found(store: MemoryStore) -> set[tuple[str, str]]:
    """Return the kind and the path of each violation that an audit finds."""
    return {(one.kind, one.where) for one in audit(store, deep=True).violations}


@pytest.mark.parametrize("given", [{"async_ratio": 0}, {"async_ratio": 5}, {"versions": 12}, {"groups": 9}])
def test_run_with_a_changed_config_passes_the_audit(given: dict[str, Any]) -> None:
    store, _ = changed_run(**given)
    assert audit(store).clean
    assert audit(store, deep=True).clean
    assert audit(store).clean  # this audit continues from the stored result
    assert [one.config_sha256 for one in _bodies(store)] == [one.sha256 for one in recorded_configs(Log(store))[1:]]
    assert list_orphans(store, 0.0) == []


def _bodies(store: MemoryStore) -> list[ConfigChanged]:
    return [entry.body for entry in of_kind(store, ConfigChanged) if isinstance(entry.body, ConfigChanged)]


def test_batch_is_audited_against_the_config_of_its_time() -> None:
    """A batch is two versions old, and alpha becomes 0 after the batch was committed. When the batch is checked again,
    the audit still uses the earlier alpha.
    """
    store = MemoryStore(uuid.uuid4().hex)
    actors = Actors.begin(store, 2.0, versions=9)
    for _ in range(2):
        actors.scheduler.dispatch(0)
    actors.train(2)
    actors = resumed(store, async_ratio=0, rollout={"redundant_responses": 1}).train(3)
    assert audit(store, deep=True).clean
    file = next(e.body.file for e in of_kind(store, BatchCommitted) if isinstance(e.body, BatchCommitted))
    data = store.get(file.path)
    store.put(file.path, data[:-1])
    assert found(store) == {("altered", file.path)}


def forged_config(body: ConfigChanged) -> ConfigChanged:
    return replace(body, config={**body.config, "async_ratio": 99})


def forged_config_with_its_hash(body: ConfigChanged) -> ConfigChanged:
    config = {**body.config, "async_ratio": 99}
    return replace(body, config=config, config_sha256=sha256_of(config))


def forged_list(body: ConfigChanged) -> ConfigChanged:
    return replace(body, changes=(*body.changes, body.changes[0]._replace(key="train.learning_rate")))


def another_seed(body: ConfigChanged) -> ConfigChanged:
    return replace(body, config={**body.config, "seed": 5})


def from_another_version(body: ConfigChanged) -> ConfigChanged:
    return replace(body, version=body.version - 1)


@pytest.mark.parametrize(
    ("forge", "kinds"),
    [
        (forged_config, {"altered", "lineage"}),
        (forged_config_with_its_hash, {"lineage"}),
        (forged_list, {"lineage"}),
        (another_seed, {"lineage"}),
        (from_another_version, {"lineage"}),
    ],
)
def test_audit_finds_a_forged_config_change(forge: Any, kinds: set[str]) -> None:
    store, _ = changed_run(async_ratio=1)
    [entry] = of_kind(store, ConfigChanged)
    changed(store, entry.n, forge)
    named = {(kind, where) for kind, where in found(store) if where == entry_path(entry.n)}
    assert named == {(kind, entry_path(entry.n)) for kind in kinds}


def test_audit_finds_a_removed_config_change() -> None:
    """Without the config change the old claims would be valid, but the log contains new claims of the roles."""
    store, _ = changed_run(2.0, 2, async_ratio=0, rollout={"redundant_responses": 2})
    entries = [entry for entry in read(store) if not isinstance(entry.body, ConfigChanged)]
    rewritten(store, entries)
    assert found(store)


def test_processes_from_before_a_config_change_cannot_append() -> None:
    store = MemoryStore(uuid.uuid4().hex)
    actors = Actors.begin(store, 1.0, versions=9)
    actors.ahead()
    actors.learner.log.follow()
    Supervisor(store).change(versions=12)
    for step in (actors.learner.publish, actors.scheduler.commit):
        with pytest.raises(EntryRefused, match="config was changed"):
            step()
    assert len(of_kind(store, VersionPublished)) == 1


def test_configs_are_read_from_a_damaged_log() -> None:
    store, _ = changed_run(2.0, 2, async_ratio=1)
    kept: list[RecordedConfig] = recorded_configs(Log(store))
    store.put(entry_path(4), b"{}")
    assert readable_configs(store) == kept


@pytest.mark.many
@settings(max_examples=examples(200), deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["train", "ahead", "async_ratio", "versions", "train.learning_rate", "store", "crash"]),
            st.integers(0, 3),
        ),
        max_size=14,
    )
)
def test_random_runs_with_config_changes_pass_the_audit(steps: list[tuple[str, int]]) -> None:
    """After any sequence of training, config changes and restarts, the audit finds no violation, and each version has
    the config under which it was trained.
    """
    store = MemoryStore(uuid.uuid4().hex)
    actors = Actors.begin(store, 2.0, versions=99)
    trained = {0: recorded_configs(Log(store))[-1].sha256}
    for what, value in steps:
        if what == "train":
            train(actors, value)
        elif what == "ahead" and actors.scheduler.number <= Log(store).state.version + Log(store).state.alpha:
            actors.ahead()
        elif what == "crash":
            claim = Supervisor(store).writer.claim
            actors = Actors(actors.supervisor, RealScheduler(store, claim), Learner(store, claim))
        elif what not in ("train", "ahead"):
            actors = _changed(store, actors, what, value)
        log = Log(store)
        trained |= {
            version: trained.get(version, recorded_configs(log)[-1].sha256) for version in range(log.state.version + 1)
        }
    log = Log(store)
    configs = {one.entry: one.sha256 for one in recorded_configs(log)}
    assert {version: configs[log.state.config_of(version)] for version in trained} == trained
    assert audit(store).clean
    assert audit(store, deep=True).clean


def train(actors: Actors, count: int) -> None:
    """Train `count` versions, each on a waiting batch if there is one, or else on a new batch."""
    for _ in range(count):
        actors.learner.log.follow()
        if actors.learner.log.state.version not in actors.learner.log.state.waiting:
            actors.ahead()
            actors.learner.log.follow()
        actors.learner.publish()
        if actors.learner.log.state.releasable:
            actors.prune()


def _changed(store: MemoryStore, actors: Actors, what: str, value: int) -> Actors:
    """Change the run's config, and return the restarted actors. If the log refuses the config, they run under the old
    config.
    """
    before = recorded_configs(Log(store))[-1].config
    values = {"versions": 50 + value, "store": {**before["store"], "keep_last": 1 + value}}
    key = what.partition(".")[0]
    given = {key: {"learning_rate": value} if what == "train.learning_rate" else values.get(key, value)}
    try:
        return resumed(store, **given)
    except EntryRefused:
        claim = Supervisor(store).writer.claim
        return Actors(actors.supervisor, RealScheduler(store, claim), Learner(store, claim))
