"""Tests of an audit's counts, and of its checks of the run's config, of the objects of policy versions, and of the log
against snapshots and older audits.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from rollflow.flows.views.audit_table import print_report
from rollflow.storage.audit import checkpoints
from rollflow.storage.audit.audit import audit
from rollflow.storage.audit.report import SPANS, AuditReport, RowCounts
from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.log import snapshots
from rollflow.storage.log.entries import Pruned, RunCreated, entry_path, seal_tree
from rollflow.storage.log.run_log import Log
from rollflow.storage.log.state import FOLD
from rollflow.storage.objects import ObjectStore
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import DiscardReason, StoredObject
from rollflow.tasks.prompts.config import ReasoningGymPrompts
from rollflow.tasks.run.config import RunConfig
from tests.support.audited import ALPHA, VERSIONS, WATCHING, Watched, file_of, found, lagging, other_alpha, weights_of
from tests.support.log_runs import (
    DOMAINS,
    Actors,
    G,
    changed,
    committed,
    forget,
    inserted,
    published,
    read,
    resealed,
    rewritten,
    sha256_of,
)

# --- counts of an audit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_audit_of_a_whole_run_is_clean_and_counts_everything(where: str, store: MemoryStore, tmp_path: Path) -> None:
    run: ObjectStore = store if where == "memory" else LocalStore(tmp_path)
    actors = lagging(run)
    actors.scheduler.dispatch(VERSIONS)
    actors.scheduler.discard(2, DiscardReason.FILTERED)
    actors.ahead()
    report = audit(run)
    assert report.violations == []
    assert (report.run, report.async_ratio, report.versions, report.entries) == ("test", ALPHA, 6, len(read(run)))
    assert report.trajectories == VERSIONS * 2 * G
    # batch 0 is trained on at 0, batch 1 at 1, of batches 2 to 5 three samples of four at 2, and the fourth at 1
    assert report.staleness == {0: 8, 1: 8 + 4 * 2, 2: 4 * 6}
    assert report.staleness_by_version[1] == {0: 8}
    assert report.domains == {DOMAINS[0]: 8, DOMAINS[1]: 4}
    assert report.fates == {"trained": 12, "committed, waiting": 4, "discarded: filtered": 1}
    assert (report.trained_tokens, report.discarded_tokens, report.surplus_tokens) == (12 * 10, 5, VERSIONS * 3)
    kept = sum(path.startswith(("policies", "trajectories")) for path in run.list())
    assert report.objects == kept


def test_prompt_without_an_outcome_is_reported_as_in_flight(store: MemoryStore) -> None:
    actors = Actors.begin(store)
    for _ in range(3):
        actors.scheduler.dispatch(0)
    actors.ahead()
    assert audit(store).fates == {"committed, waiting": 2, "in flight": 1}


def test_printed_audit_report_has_totals_and_violations(run: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    run.delete(file_of(run, 3))
    print_report(audit(run), dict.fromkeys(DOMAINS, 0.5))
    shown = capsys.readouterr().out
    assert "run test: 6 versions, 40 trained trajectories" in shown
    assert "missing trajectories/00000003-" in shown.replace("\n", " ")


def test_audit_of_a_long_run_counts_by_version_ranges() -> None:
    report, doubled = AuditReport(), {1: 1, SPANS + 1: 2, 2 * SPANS + 1: 4, 4 * SPANS + 1: 8}
    for version in range(1, 4 * SPANS + 2):
        report.count_trained(version, RowCounts(Counter({version % 2: 3}), Counter({"sums": 1})))
        assert report.span == max(span for first, span in doubled.items() if version >= first)
    assert sorted(report.staleness_by_version) == list(range(1, 4 * SPANS + 2, 8))
    assert report.staleness_by_version[9] == {0: 12, 1: 12}
    assert report.trajectories == 3 * (4 * SPANS + 1) == report.staleness.total()


def test_audit_of_a_missing_run_is_refused(store: MemoryStore) -> None:
    with pytest.raises(Missing, match="there is no run in memory://"):
        audit(store)


def test_config_hash_in_the_report_equals_that_of_the_log(store: MemoryStore) -> None:
    """The config read back from JSON has the hash of the original settings."""
    options = {"min_digits": 2, "rate": 1e-30, "names": ["ä", "b"]}
    prompts = (ReasoningGymPrompts(share=1 / 3), ReasoningGymPrompts(family="basic_arithmetic", options=options))
    config = RunConfig(async_ratio=0.1 + 0.2, prompts=prompts)
    Log(store).create(RunCreated("real", config.model_dump(mode="json"), config.sha256(), 1))
    assert audit(store).violations == []


# --- the run's config ------------------------------------------------------------------------------------------


def test_audit_finds_an_altered_alpha(run: MemoryStore) -> None:
    body = read(run)[0].body
    assert isinstance(body, RunCreated)
    resealed(run, 0, body=other_alpha(body, 3.5))
    assert found(run) == {("altered", entry_path(0))}
    whats = [violation.what for violation in audit(run).violations]
    assert whats == [
        "the entry's config does not match the entry's hash of the config",
        "entry 1 names another hash for this entry",
    ]


def test_audit_finds_an_altered_alpha_in_a_new_hash_chain(run: MemoryStore) -> None:
    changed(run, 0, lambda body: other_alpha(body, 3.5))
    assert found(run) == {("altered", entry_path(0))}


def test_audit_finds_an_altered_alpha_with_new_hashes(run: MemoryStore) -> None:
    """The log's rules and the rows of the batches show the fault: the trajectories are older than the altered alpha
    allows.
    """

    def stricter(body: RunCreated) -> RunCreated:
        body = other_alpha(body, 0.0)
        return replace(body, config_sha256=sha256_of(body.config))

    changed(run, 0, stricter)
    older = [number for number in range(VERSIONS + 1) if committed(run, number).version < number]
    assert older
    wrong = {("stale", file_of(run, n)) for n in older} | {("stale", entry_path(committed(run, n).n)) for n in older}
    assert found(run) == wrong


def test_audit_finds_missing_prompt_and_altered_policy_files(store: MemoryStore) -> None:
    kept = StoredObject("prompts/ab.jsonl", 3, store.put("prompts/ab.jsonl", b"abc"))
    policy = StoredObject("policy/config.json", 2, store.put("policy/config.json", b"{}"))
    Actors.begin(store).train(1)
    pin = {"kept": kept.path, "size": kept.size, "sha256": kept.sha256}
    changed(store, 0, lambda body: replace(body, prompts=(pin, {"kept": ""}), policy=(policy,)))
    assert found(store) == set()
    forget(store)
    store.delete(kept.path)
    store.put(policy.path, b"[]")
    assert found(store) == {("missing", kept.path), ("altered", policy.path)}
    assert audit(store).violations[0].what == "the object is missing, but entry 0 names it"


# --- objects of policy versions --------------------------------------------------------------------------------


def test_audit_finds_missing_newest_weights(run: MemoryStore) -> None:
    path = weights_of(run, VERSIONS)
    run.delete(path)
    assert found(run) == {("missing", path)}


def test_audit_finds_a_newest_version_without_weights(run: MemoryStore) -> None:
    entry = published(run, VERSIONS)
    changed(run, entry.n, lambda body: replace(body, weights=()))
    kinds = {(kind, where) for kind, where in found(run) if where == entry_path(entry.n)}
    assert kinds == {("missing", entry_path(entry.n))}


def test_audit_finds_altered_weights(run: MemoryStore) -> None:
    path = weights_of(run, 4)
    run.put(path, run.get(path)[:-1] + b"?")
    assert found(run) == {("altered", path)}


def test_audit_finds_a_missing_object_that_should_exist(store: MemoryStore) -> None:
    Actors.begin(store).train(9, prune=False)
    forget(store)
    state = Log(store).state
    assert [v for v in range(10) if not state.retention.is_needed("weights", v, 9)] == [1, 2, 5]
    store.delete(weights_of(store, 1))  # this object is not needed, so it may be missing
    assert found(store) == set()
    forget(store)
    kept = [path for path in store.list() if path.startswith(("policies", "trajectories"))]
    report = audit(store, deep=True)
    assert (report.objects, report.bytes) == (len(kept), sum(len(store.get(path)) for path in kept))
    forget(store)
    store.put(weights_of(store, 5), b"something else")  # this object is not needed, but it exists
    store.delete(weights_of(store, 4))  # the weights of this version are kept forever
    assert found(store) == {("altered", weights_of(store, 5)), ("missing", weights_of(store, 4))}


def test_audit_finds_a_deleted_object_that_is_needed(run: MemoryStore) -> None:
    entries = read(run)
    last = entries[-1]
    learner = max(entry.claim for entry in entries if entry.role == "learner")
    pruned = replace(last, role="learner", claim=learner, body=Pruned(((VERSIONS, "weights"),)))
    inserted(run, len(entries), pruned)
    run.delete(weights_of(run, VERSIONS))
    assert found(run) == {("lineage", entry_path(len(entries))), ("missing", weights_of(run, VERSIONS))}


# --- a log that contradicts snapshots and older audits ---------------------------------------------------------


def test_audit_finds_a_log_truncated_after_an_earlier_audit(run: MemoryStore) -> None:
    assert audit(run).clean
    end = len(read(run)) - 1
    run.delete(entry_path(end))
    assert found(run) == {("gap", entry_path(end))}


def test_error_names_the_snapshot_that_proves_truncation(store: MemoryStore) -> None:
    Actors.begin(store).train(VERSIONS)
    seen = list(store.list("log_snapshots"))
    assert [int(path[14:24]) for path in seen] == [7, 11, 15]
    for n in range(6, len(read(store))):
        store.delete(entry_path(n))
    assert found(store) == {("gap", entry_path(6))}
    assert audit(store).violations[0].what == (
        f"the log ends with entry 5, but {seen[-1]} was made when the log had entry 15"
    )


@pytest.mark.parametrize("seen_by", ["audits", "log_snapshots"])
def test_snapshot_or_old_audit_reveals_a_rewritten_log(run: MemoryStore, seen_by: str) -> None:
    """All hashes match, and the log's rules accept every entry. Only snapshots and older audits show the fault."""
    if seen_by == "audits":
        assert audit(run).clean
    else:
        run.delete(entry_path(len(read(run)) - 1))
        Log(run).settle()
    seen = {path: run.get(path) for path in run.list(seen_by)}
    assert seen
    entries = read(run)
    entries[4] = replace(entries[4], at=0.0)
    rewritten(run, entries)
    assert found(run) == set()
    forget(run)
    for path, data in seen.items():
        run.put(path, data)
    assert {kind for kind, _ in found(run)} == {"altered"}


@pytest.mark.parametrize(
    "junk", [b"", b"[]", seal_tree({}), seal_tree({"fold": FOLD}), seal_tree({"fold": FOLD, "state": 3})]
)
def test_unreadable_log_snapshot_is_not_a_violation(run: MemoryStore, junk: bytes) -> None:
    run.put(snapshots.snapshot_path(7, "f" * 64), junk)
    run.put(snapshots.snapshot_path(9_000, "f" * 64), junk)
    run.put(checkpoints.audit_path(8), junk)
    run.put(checkpoints.audit_path(9), seal_tree({"fold": FOLD, "rules": checkpoints.RULES, "audited": [7]}))
    assert found(run) == set()


@pytest.mark.parametrize("error", [Missing, Corrupt])
def test_unreachable_log_snapshot_is_not_a_violation(
    store: MemoryStore, watched: Watched, error: type[Exception]
) -> None:
    """The snapshot was deleted after snapshots were listed, or its bytes are wrong."""
    Actors.begin(store).train(1)
    assert audit(store).clean
    store.put(snapshots.snapshot_path(9_000, "f" * 64), b"")

    def before(path: str) -> None:
        if path.startswith(("audits", "log_snapshots")):
            raise error(path)

    WATCHING[watched.name] = before
    report = audit(watched)
    assert (report.violations, report.since) == ([], 0)


def test_log_snapshot_with_a_wrong_name_is_not_a_violation(store: MemoryStore) -> None:
    """The name of the snapshot contains the number of a later entry, or another hash."""
    Actors.begin(store).train(2)
    [*_, path] = store.list("log_snapshots")
    state = snapshots.from_bytes(store.get(path))
    assert state.n == 7
    store.put(snapshots.snapshot_path(9_000, state.sha256), store.get(path))
    store.put(snapshots.snapshot_path(7, "f" * 64), store.get(path))
    assert found(store) == set()
