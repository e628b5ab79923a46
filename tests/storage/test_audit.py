"""The audit of a log accepts what the roles write, and names each fault that is planted, by kind and path."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rollflow.flows.views.audit_table import print_report
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import Corrupt, Missing, Unreachable
from rollflow.storage.log import audits, objects, snapshots
from rollflow.storage.log.audit import Progress, audit
from rollflow.storage.log.entries import (
    BatchCommitted,
    BatchVoided,
    Group,
    Pruned,
    RunCreated,
    VersionPublished,
    entry_path,
)
from rollflow.storage.log.log import Log
from rollflow.storage.log.refold import MOST
from rollflow.storage.log.report import SPANS, AuditReport, Rows
from rollflow.storage.log.rows import Rules
from rollflow.storage.objects import ObjectStore
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import Discard, DiscardReason, StoredObject, TrajectoryGroup
from rollflow.tasks.clock import run_virtual
from rollflow.tasks.config import RunConfig
from rollflow.tasks.prompts.config import ReasoningGymPrompts
from tests.support.log_actors import GROUPS, Scheduler, Supervisor
from tests.support.log_runs import (
    DOMAINS,
    Actors,
    G,
    RealScheduler,
    changed,
    committed,
    forget,
    inserted,
    of_kind,
    published,
    read,
    rebatched,
    resealed,
    rewritten,
    sha256_of,
)
from tests.support.pipeline import Damage, Pipeline

VERSIONS, ALPHA = 6, 3.0


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot after every fourth entry."""
    monkeypatch.setattr(snapshots, "EVERY", 4)


@pytest.fixture
def run(store: MemoryStore) -> MemoryStore:
    """As `lagging`; nothing but its entries tells what its log was."""
    lagging(store)
    assert audit(store).clean
    forget(store)
    return store


def lagging(store: ObjectStore) -> Actors:
    """Six versions and a batch that waits, formed one ahead; groups are committed a version after they were started."""
    actors = Actors.begin(store, alpha=ALPHA)
    actors.ahead()
    started(actors, 0)
    for version in range(VERSIONS):
        started(actors, version)
        actors.train()
    return actors


def started(actors: Actors, version: int) -> None:
    """A batch's groups run."""
    for _ in range(GROUPS):
        actors.scheduler.dispatch(version)


def found(run: ObjectStore) -> set[tuple[str, str]]:
    """Kind and path of all violations, which an audit from the first entry and a later one agree on."""
    violations = audit(run, deep=True).violations
    assert audit(run).violations == violations
    return {(violation.kind, violation.where) for violation in violations}


def file_of(run: ObjectStore, number: int) -> str:
    body = committed(run, number).body
    assert isinstance(body, BatchCommitted)
    return body.file.path


def weights_of(run: ObjectStore, version: int) -> str:
    body = published(run, version).body
    assert isinstance(body, VersionPublished)
    return body.weights[0].path


# --- what is counted -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_a_whole_run_is_clean_and_counted(where: str, store: MemoryStore, tmp_path: Path) -> None:
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


def test_the_table_for_a_person_shows_it(run: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    run.delete(file_of(run, 3))
    print_report(audit(run), dict.fromkeys(DOMAINS, 0.5))
    shown = capsys.readouterr().out
    assert "run test: 6 versions, 40 trajectories" in shown
    assert "missing trajectories/00000003-" in shown.replace("\n", " ")


def test_a_long_run_is_counted_by_spans_of_versions() -> None:
    report = AuditReport()
    for version in range(1, 4 * SPANS + 2):
        report.trained(version, Rows(Counter({version % 2: 3}), Counter({"sums": 1})))
    assert report.span == 8
    assert sorted(report.staleness_by_version) == list(range(1, 4 * SPANS + 2, 8))
    assert report.staleness_by_version[9] == {0: 12, 1: 12}
    assert report.trajectories == 3 * (4 * SPANS + 1) == report.staleness.total()


def test_no_run_there(store: MemoryStore) -> None:
    with pytest.raises(Missing, match="there is no run at memory://"):
        audit(store)


def test_the_hash_of_a_real_config_is_that_of_what_the_log_holds(store: MemoryStore) -> None:
    """As JSON comes back, the config has the hash that the settings gave it."""
    options = {"min_digits": 2, "rate": 1e-30, "names": ["ä", "b"]}
    prompts = (ReasoningGymPrompts(share=1 / 3), ReasoningGymPrompts(family="basic_arithmetic", options=options))
    config = RunConfig(async_ratio=0.1 + 0.2, prompts=prompts)
    Log(store).create(RunCreated("real", config.model_dump(mode="json"), config.sha256(), 1))
    assert audit(store).violations == []


# --- batches ---------------------------------------------------------------------------------------------------


def test_a_group_with_one_of_its_four_samples(run: MemoryStore) -> None:
    path = rebatched(run, 3, lambda groups: [replace(groups[0], trajectories=groups[0].trajectories[:1]), groups[1]])
    assert found(run) == {("missing", path)}
    assert "has 1 of 4 samples: [0]" in audit(run).violations[0].what


def test_one_sample_four_times(run: MemoryStore) -> None:
    path = rebatched(
        run, 3, lambda groups: [groups[0], replace(groups[1], trajectories=groups[1].trajectories[:1] * 4)]
    )
    assert found(run) == {("duplicate", path)}
    assert "(sample: times): {0: 4}" in audit(run).violations[0].what


@pytest.mark.parametrize("sample", [-1, 4])
def test_a_sample_that_was_not_asked_for(run: MemoryStore, sample: int) -> None:
    path = rebatched(run, 3, lambda groups: [of_first(groups[0], sample=sample), groups[1]])
    assert found(run) == {("altered", path)}


def test_one_sample_more(run: MemoryStore) -> None:
    def more(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
        made = groups[0].trajectories
        return [replace(groups[0], trajectories=(*made, replace(made[0], sample=4))), groups[1]]

    path = rebatched(run, 3, more)
    assert found(run) == {("altered", path)}


def test_of_surplus_responses_any_four_are_a_group(store: MemoryStore) -> None:
    Actors.begin(store, rollout={"extra_responses": 1}).train(2)
    rebatched(store, 1, lambda groups: [of_first(group, sample=4) for group in groups])
    assert found(store) == set()
    path = rebatched(store, 1, lambda groups: [of_first(group, sample=5) for group in groups])
    assert found(store) == {("altered", path)}


def of_first(group: TrajectoryGroup, **change: object) -> TrajectoryGroup:
    """The group with its first trajectory changed."""
    first = replace(group.trajectories[0], **change)  # type: ignore[arg-type]
    return replace(group, trajectories=(first, *group.trajectories[1:]))


@pytest.mark.parametrize(
    "false",
    [
        lambda group: group._replace(tokens=group.tokens + 1),
        lambda group: group._replace(started=group.started + 1),
        lambda group: group._replace(started=group.started - 1),
        lambda group: group._replace(newest=group.newest - 1),
    ],
    ids=["tokens", "started later", "started earlier", "newest"],
)
def test_false_counts_and_versions_in_an_entry(run: MemoryStore, false: Callable[[Group], Group]) -> None:
    entry = committed(run, 3)
    changed(run, entry.n, lambda body: replace(body, groups=(body.groups[0], false(body.groups[1]))))
    assert found(run) == {("lineage", file_of(run, 3))}


def test_a_false_started_version_in_a_file(run: MemoryStore) -> None:
    """Later than its tokens, and than its entry says; then earlier than that."""
    path = rebatched(run, 3, lambda groups: [groups[0], of_all(groups[1], started_version=2)])
    assert found(run) == {("lineage", path), ("stale", path)}
    path = rebatched(run, 3, lambda groups: [groups[0], of_all(groups[1], started_version=0)])
    assert found(run) == {("lineage", path)}


def test_a_false_started_version_in_file_and_entry(run: MemoryStore) -> None:
    """Both say the same; the tokens are older."""
    path = rebatched(run, 3, lambda groups: [groups[0], of_all(groups[1], started_version=2)])
    changed(run, committed(run, 3).n, lambda body: replace(body, groups=(body.groups[0], said(body, started=2))))
    assert found(run) == {("stale", path)}


def said(body: BatchCommitted, **change: int) -> Group:
    """The second group of a commit, with something else said of it."""
    return body.groups[1]._replace(**change)


def of_all(group: TrajectoryGroup, **change: object) -> TrajectoryGroup:
    """The group with all its trajectories changed."""
    return replace(group, trajectories=tuple(replace(t, **change) for t in group.trajectories))  # type: ignore[arg-type]


def test_tokens_of_a_version_that_did_not_exist(run: MemoryStore) -> None:
    """In the file; then in the entry, too."""

    def later(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
        return [groups[0], of_first(groups[1], versions=(-1, 2, 4))]

    assert committed(run, 3).version == 2
    path = rebatched(run, 3, later)
    assert found(run) == {("lineage", path), ("stale", path)}
    changed(run, committed(run, 3).n, lambda body: replace(body, groups=(body.groups[0], said(body, newest=4))))
    assert found(run) == {("stale", path), ("stale", entry_path(committed(run, 3).n))}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"reward": float("nan")}, "lineage"),
        ({"reward": float("inf")}, "lineage"),
        ({"logprobs": (0.0, 0.5, -1.0)}, "lineage"),
        ({"logprobs": (0.0, float("-inf"), -1.0)}, "lineage"),
        ({"logprobs": (0.0, -0.5)}, "altered"),
        ({"versions": (-1, 2, 2, 2)}, "altered"),
        ({"loss_mask": (False, True)}, "altered"),
    ],
)
def test_values_that_cannot_be(run: MemoryStore, change: dict[str, object], kind: str) -> None:
    path = rebatched(run, 3, lambda groups: [groups[0], of_first(groups[1], **change)])
    assert found(run) == {(kind, path)}


def test_a_trajectory_without_a_token_that_was_started_too_late(run: MemoryStore) -> None:
    late = {"started_version": 3, "loss_mask": (False, False, False)}
    path = rebatched(run, 3, lambda groups: [groups[0], of_first(groups[1], **late)])
    assert found(run) == {("lineage", path), ("stale", path)}
    assert "a trajectory was started under version 3, the newest of then was 2" in {
        v.what for v in audit(run).violations
    }


def test_a_mask_that_is_false_where_the_entry_counts(run: MemoryStore) -> None:
    path = rebatched(run, 3, lambda groups: [groups[0], of_first(groups[1], loss_mask=(False, False, True))])
    assert found(run) == {("lineage", path)}


def test_a_batch_file_swapped_with_anothers(run: MemoryStore) -> None:
    one, other = file_of(run, 2), file_of(run, 3)
    first, second = run.get(one), run.get(other)
    run.put(one, second)
    run.put(other, first)
    assert found(run) == {("altered", one), ("altered", other)}


def test_entries_that_name_each_others_files(run: MemoryStore) -> None:
    """Size and hash are right; what is in them is not what the entries say."""
    second, third = committed(run, 2), committed(run, 3)
    assert isinstance(second.body, BatchCommitted)
    assert isinstance(third.body, BatchCommitted)
    files = second.body.file, third.body.file
    changed(run, second.n, lambda body: replace(body, file=files[1]))
    changed(run, third.n, lambda body: replace(body, file=files[0]))
    assert found(run) >= {("altered", files[0].path), ("altered", files[1].path)}


@pytest.mark.parametrize(("how", "kind"), [("flipped", "altered"), ("cut", "altered"), ("gone", "missing")])
def test_a_damaged_batch_file(run: MemoryStore, how: str, kind: str) -> None:
    path = file_of(run, 4)
    data = bytearray(run.get(path))
    if how == "flipped":
        data[len(data) // 2] ^= 1
    run.put(path, bytes(data[:-9] if how == "cut" else data))
    if how == "gone":
        run.delete(path)
    assert found(run) == {(kind, path)}


def test_bytes_that_were_never_a_batch(run: MemoryStore) -> None:
    entry = committed(run, 3)
    file = StoredObject(file_of(run, 3), 5, run.put(file_of(run, 3), b"words"))
    changed(run, entry.n, lambda body: replace(body, file=file))
    assert found(run) == {("altered", file.path)}


# --- the run's config ------------------------------------------------------------------------------------------


def other_alpha(body: RunCreated, alpha: float) -> RunCreated:
    return replace(body, config={**body.config, "async_ratio": alpha})


def test_alpha_edited_in_the_config(run: MemoryStore) -> None:
    body = read(run)[0].body
    assert isinstance(body, RunCreated)
    resealed(run, 0, body=other_alpha(body, 3.5))
    assert found(run) == {("altered", entry_path(0))}
    whats = [violation.what for violation in audit(run).violations]
    assert whats == [
        "the config is not the one whose hash stands beside it",
        "entry 1 follows another entry 0 than the one that is there: this one",
    ]


def test_alpha_edited_and_chained_anew(run: MemoryStore) -> None:
    changed(run, 0, lambda body: other_alpha(body, 3.5))
    assert found(run) == {("altered", entry_path(0))}


def test_alpha_edited_and_hashed_and_chained_anew(run: MemoryStore) -> None:
    """The fold and the rows tell: the bound comes from storage, and the trajectories are older than it allows."""

    def stricter(body: RunCreated) -> RunCreated:
        body = other_alpha(body, 0.0)
        return replace(body, config_sha256=sha256_of(body.config))

    changed(run, 0, stricter)
    older = [number for number in range(VERSIONS + 1) if committed(run, number).version < number]
    assert older
    wrong = {("stale", file_of(run, n)) for n in older} | {("stale", entry_path(committed(run, n).n)) for n in older}
    assert found(run) == wrong


def test_a_prepared_object_that_is_not_there(store: MemoryStore) -> None:
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


# --- objects of versions ---------------------------------------------------------------------------------------


def test_a_newest_version_whose_weights_are_gone(run: MemoryStore) -> None:
    path = weights_of(run, VERSIONS)
    run.delete(path)
    assert found(run) == {("missing", path)}


def test_a_newest_version_without_weights(run: MemoryStore) -> None:
    entry = published(run, VERSIONS)
    changed(run, entry.n, lambda body: replace(body, weights=()))
    kinds = {(kind, where) for kind, where in found(run) if where == entry_path(entry.n)}
    assert kinds == {("missing", entry_path(entry.n))}


def test_altered_weights(run: MemoryStore) -> None:
    path = weights_of(run, 4)
    run.put(path, run.get(path)[:-1] + b"?")
    assert found(run) == {("altered", path)}


def test_what_retention_needs_is_gone_and_nobody_has_pruned_it(store: MemoryStore) -> None:
    Actors.begin(store).train(9, prune=False)
    forget(store)
    state = Log(store).state
    assert [v for v in range(10) if not state.retention.needed("weights", v, 9)] == [1, 2, 5]
    store.delete(weights_of(store, 1))  # not needed: it may be gone
    assert found(store) == set()
    forget(store)
    kept = [path for path in store.list() if path.startswith(("policies", "trajectories"))]
    report = audit(store, deep=True)
    assert (report.objects, report.bytes) == (len(kept), sum(len(store.get(path)) for path in kept))
    forget(store)
    store.put(weights_of(store, 5), b"something else")  # not needed, but there
    store.delete(weights_of(store, 4))  # kept for good
    assert found(store) == {("altered", weights_of(store, 5)), ("missing", weights_of(store, 4))}


def test_a_pruned_object_that_is_needed(run: MemoryStore) -> None:
    entries = read(run)
    last = entries[-1]
    learner = max(entry.claim for entry in entries if entry.role == "learner")
    pruned = replace(last, role="learner", claim=learner, body=Pruned(((VERSIONS, "weights"),)))
    inserted(run, len(entries), pruned)
    run.delete(weights_of(run, VERSIONS))
    assert found(run) == {("lineage", entry_path(len(entries))), ("missing", weights_of(run, VERSIONS))}


# --- entries ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [True, False])
@pytest.mark.parametrize("how", ["missing", "altered", "cut"])
def test_a_damaged_entry(store: MemoryStore, how: str, segments: bool) -> None:
    """It is named; with its segment the rest is judged as ever, without it, as far as that goes."""
    Actors.begin(store).train(VERSIONS)
    if not segments:
        forget(store)
    n = committed(store, 2).n
    path, data = entry_path(n), store.get(entry_path(n))
    store.put(path, data[:-9] if how == "cut" else data[:40] + bytes([data[40] ^ 1]) + data[41:])
    if how == "missing":
        store.delete(path)
    lost = file_of_last(store)
    store.put(lost, b"something else")
    kind = "gap" if how == "missing" else "altered"
    assert found(store) == {(kind, path), ("altered", lost)}
    assert audit(store).versions == (VERSIONS if segments else 2)


def file_of_last(run: ObjectStore) -> str:
    return max(path for path in run.list("trajectories"))


def test_several_missing_entries_are_read_from_their_segments(store: MemoryStore) -> None:
    lagging(store)
    for n in (6, 7, 8, 9):
        store.delete(entry_path(n))
    assert found(store) == {("gap", entry_path(6))}
    assert audit(store).versions == VERSIONS
    store.put("log_segments/0000000004.jsonl", b"cut")
    assert found(store) == {("gap", entry_path(6))}
    assert audit(store).versions == 0


def test_two_missing_entries_are_both_named(run: MemoryStore) -> None:
    run.delete(entry_path(5))
    run.delete(entry_path(6))
    what = "log/0000000005.json to log/0000000006.json missing, log/0000000007.json is there"
    assert [violation.what for violation in audit(run).violations] == [what]


def test_several_missing_entries_are_one_gap(run: MemoryStore) -> None:
    for n in (5, 6, 7):
        run.delete(entry_path(n))
    assert found(run) == {("gap", entry_path(5))}
    what = "log/0000000005.json to log/0000000007.json missing, log/0000000008.json is there"
    assert audit(run).violations[0].what == what


@pytest.mark.parametrize(("end", "plain"), [(9, True), (10, False)])
def test_a_long_hole_on_a_folder_is_found_by_a_deep_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: int, plain: bool
) -> None:
    """A short one by any: three numbers behind a free one are looked at."""
    monkeypatch.setattr("rollflow.storage.log.reading.AHEAD", 4)
    store = LocalStore(tmp_path)
    Actors.begin(store).train(VERSIONS)
    forget(store)
    for n in range(6, end):
        store.delete(entry_path(n))
    assert [(v.kind, v.where) for v in audit(store, deep=True).violations] == [("gap", entry_path(6))]
    assert audit(store).clean is not plain


@pytest.mark.parametrize("name", ["99", "notes", "0000000099.json~", "²", "00000000099"])
def test_what_is_no_entry_by_its_name_is_none(run: MemoryStore, name: str) -> None:
    run.put(f"log/{name}.json", b"?")
    assert found(run) == set()
    assert Log(run).state.version == VERSIONS


def test_an_entry_altered_and_resealed(run: MemoryStore) -> None:
    n = committed(run, 2).n
    resealed(run, n, at=0.0)
    assert found(run) == {("altered", entry_path(n))}


def test_a_newest_entry_that_follows_another_one(run: MemoryStore) -> None:
    n = len(read(run)) - 1
    resealed(run, n, prev="0" * 64)
    assert found(run) == {("altered", entry_path(n))}


def test_an_entry_altered_with_what_it_follows(run: MemoryStore) -> None:
    resealed(run, 6, prev="0" * 64)
    assert found(run) == {("altered", entry_path(6))}


def test_swapped_entries(run: MemoryStore) -> None:
    fifth, sixth = run.get(entry_path(5)), run.get(entry_path(6))
    run.put(entry_path(5), sixth)
    run.put(entry_path(6), fifth)
    assert found(run) == {("altered", entry_path(5)), ("altered", entry_path(6))}


def test_swapped_and_resealed_entries(run: MemoryStore) -> None:
    entries = read(run)
    for n, other in ((5, 6), (6, 5)):
        resealed(run, n, **{name: getattr(entries[other], name) for name in ("id", "role", "claim", "body")})
    assert found(run) >= {("gap", entry_path(5)), ("altered", entry_path(6))}  # batch 1 before batch 0


def test_swapped_entries_in_a_new_chain(run: MemoryStore) -> None:
    """A version before the batch that it was trained on."""
    entries = read(run)
    n = committed(run, 2).n
    after = published(run, 3).n
    entries[n], entries[after] = entries[after], entries[n]
    rewritten(run, entries)
    assert ("gap", entry_path(n)) in found(run)


def test_an_inserted_commit_of_groups_that_have_their_fates(run: MemoryStore) -> None:
    again = committed(run, VERSIONS)
    assert isinstance(again.body, BatchCommitted)
    at = len(read(run))
    state = Log(run).state
    body = replace(again.body, number=state.next_batch, issued=())
    inserted(run, at, replace(again, body=body, version=state.version, batch=state.next_batch + 1))
    assert ("duplicate", entry_path(at)) in found(run)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: {"groups": body.groups[:1] * 2},
        lambda body: {"issued": (*body.issued, 0)},
        lambda body: {"discards": (Discard(body.groups[0].key, DiscardReason.STALE, 0, 5),)},
    ],
    ids=["a group twice", "a prompt issued twice", "trained on and discarded"],
)
def test_a_commit_that_gives_a_dispatch_two_fates(
    run: MemoryStore, change: Callable[[BatchCommitted], dict[str, object]]
) -> None:
    entry = committed(run, VERSIONS)
    changed(run, entry.n, lambda body: replace(body, **change(body)))
    assert {(kind, where) for kind, where in found(run) if where.startswith("log/")} == {
        ("duplicate", entry_path(entry.n))
    }


def test_an_inserted_commit_in_the_middle(run: MemoryStore) -> None:
    """The very same commit once more: its number is taken. What follows folds as ever."""
    again = committed(run, 2)
    inserted(run, again.n + 1, again)
    assert found(run) == {("duplicate", entry_path(again.n + 1))}


def test_an_inserted_commit_that_skips_a_prompt_or_a_number(run: MemoryStore) -> None:
    state, last = Log(run).state, committed(run, VERSIONS)
    assert isinstance(last.body, BatchCommitted)
    keys = [group._replace(prompt=state.cursor.upcoming[0] + 2) for group in last.body.groups[:1] * 2]
    body = replace(last.body, number=state.next_batch, groups=tuple(keys), issued=(keys[0].prompt,))
    skipping = replace(last, body=body, version=state.version, batch=state.next_batch + 1)
    at = len(read(run))
    inserted(run, at, replace(skipping, body=replace(body, groups=(keys[0], keys[1]._replace(attempt=1)))))
    assert ("missing", entry_path(at)) in found(run)
    rewritten(run, read(run)[:at])
    inserted(run, at, replace(skipping, body=replace(body, number=state.next_batch + 1)))
    assert ("gap", entry_path(at)) in found(run)


def test_of_entries_that_are_refused_behind_another_one_the_first_few_are_named(
    run: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without version 1 there is none that can follow."""
    monkeypatch.setattr("rollflow.storage.log.refold.MOST", 3)
    n = published(run, 1).n
    rewritten(run, [one for one in read(run) if one.n != n])
    violations = audit(run).violations
    named = [violation for violation in violations if violation.what.startswith("it cannot stand where it stands")]
    [last] = [violation for violation in violations if "refused entries, of which 3 are named" in violation.what]
    assert [violation.kind for violation in named] == [
        "stale",
        "gap",
        "stale",
        "gap",
    ]  # the first one is not passed over
    assert (last.kind, last.where) == ("lineage", entry_path(len(read(run)) - 1))
    assert {violation.where[:4] for violation in violations} == {"log/"}  # what was pruned is not missed


def test_each_commit_that_is_too_old_is_named(store: MemoryStore) -> None:
    """They stop nothing that follows."""
    lagging(store)
    changed(store, 0, lambda body: other_alpha(body, 0.5))
    stale = {where for kind, where in found(store) if (kind, where[:4]) == ("stale", "log/")}
    assert stale == {entry_path(committed(store, number).n) for number in range(1, VERSIONS + 1)}
    assert len(stale) > MOST


def test_an_inserted_version(run: MemoryStore) -> None:
    entry, at = published(run, VERSIONS), published(run, VERSIONS).n + 1
    inserted(run, at, replace(entry, version=VERSIONS + 1, body=replace(entry.body, number=VERSIONS + 1)))  # type: ignore[arg-type]
    assert found(run) == {("lineage", entry_path(at))}
    rewritten(run, [one for one in read(run) if one.n != at])
    inserted(run, at, replace(entry, body=replace(entry.body, number=VERSIONS + 2)))  # type: ignore[arg-type]
    assert ("gap", entry_path(at)) in found(run)


def test_an_inserted_void_of_a_batch_that_was_trained_on(run: MemoryStore) -> None:
    entry = committed(run, 2)
    body = BatchVoided(2, entry.n, "never")
    inserted(run, published(run, 3).n + 1, replace(entry, body=body, version=3, batch=4))
    assert found(run) == {("lineage", entry_path(published(run, 3).n + 1))}


def test_an_entry_that_says_another_head(run: MemoryStore) -> None:
    entries = read(run)
    entries[7] = replace(entries[7], version=99)
    rewritten(run, entries)
    assert found(run) == {("lineage", entry_path(7))}


def test_a_role_that_was_deposed_goes_on(run: MemoryStore) -> None:
    """Whole, chained, and by a claim that holds no more."""
    Scheduler(run, Log(run).state.newest_claim("supervisor"))
    forget(run)
    last, at = committed(run, VERSIONS), len(read(run))
    inserted(run, at, replace(last, body=BatchVoided(VERSIONS, last.n, "late"), version=VERSIONS))
    assert found(run) == {("lineage", entry_path(at))}


def test_a_first_entry_that_is_lost_says_nothing_of_the_run(run: MemoryStore) -> None:
    data = run.get(entry_path(0))
    run.put(entry_path(0), data[:-9])
    with pytest.raises(Corrupt, match=r"log/0000000000.json is not an entry"):
        audit(run)
    run.delete(entry_path(0))
    with pytest.raises(Corrupt, match=r"log/0000000000.json missing"):
        audit(run)
    run.put(entry_path(0), data)
    changed(run, 0, lambda body: replace(body, config={}))
    with pytest.raises(Corrupt, match="cannot stand where it stands"):
        audit(run)


@pytest.mark.parametrize(("how", "kind"), [("gone", "missing"), ("altered", "altered")])
def test_an_index_object(store: MemoryStore, how: str, kind: str) -> None:
    actors = Actors.begin(store)
    for _ in range(12_000):
        actors.scheduler.dispatch(0)
    for _ in range(11_998):
        actors.scheduler.discard(2, DiscardReason.FAILED)
    actors.train(1)
    forget(store)
    assert found(store) == set()
    forget(store)
    [index] = store.list("log_index")
    path = entry_path(committed(store, 0).n)
    store.put(index, b"{}")
    if how == "gone":
        store.delete(index)
    assert found(store) == {(kind, path)}


def test_behind_a_lost_entry_it_is_still_known_what_retention_needs(run: MemoryStore) -> None:
    gap, newest = entry_path(published(run, 1).n), weights_of(run, VERSIONS)
    run.delete(gap)
    run.delete(newest)
    assert found(run) == {("gap", gap), ("missing", newest)}


def test_an_empty_batch(run: MemoryStore) -> None:
    """Its entry and its file agree; the fold refuses it."""
    entry = committed(run, VERSIONS)
    path = file_of(run, VERSIONS)
    data = TrajectoryBatch.from_groups([]).to_bytes().to_pybytes()
    file = StoredObject(path, len(data), run.put(path, data))
    changed(run, entry.n, lambda body: replace(body, file=file, groups=(), rows=0))
    assert found(run) == {("lineage", entry_path(entry.n))}


@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_whatever_object_is_damaged_is_named(run: MemoryStore, how: str) -> None:
    """But for the newest entry, when it is gone, and nobody else has seen it."""
    newest = len(read(run)) - 1
    for path in list(run.list()):
        data = run.get(path)
        if how == "gone":
            run.delete(path)
        else:
            run.put(path, data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])
        if path == entry_path(0):
            with pytest.raises(Corrupt, match=path):
                audit(run, deep=True)
        else:
            kind = "altered" if how == "flipped" else "gap" if path.startswith("log/") else "missing"
            unseen = (how, path) == ("gone", entry_path(newest))
            assert {(v.kind, v.where) for v in audit(run, deep=True).violations} == (
                set() if unseen else {(kind, path)}
            )
        run.put(path, data)
        forget(run)


# --- a log that others have seen otherwise ---------------------------------------------------------------------


def test_a_log_that_was_cut_after_an_audit(run: MemoryStore) -> None:
    assert audit(run).clean
    end = len(read(run)) - 1
    run.delete(entry_path(end))
    assert found(run) == {("gap", entry_path(end))}


@pytest.mark.parametrize("seen_by", ["audits", "log_snapshots"])
def test_a_log_that_was_written_anew_since(run: MemoryStore, seen_by: str) -> None:
    """Every hash is right, and the fold finds nothing: but for those who have seen it before."""
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


def test_a_witness_that_cannot_be_read_says_nothing(run: MemoryStore) -> None:
    run.put(snapshots.snapshot_path(7, "f" * 64), b"[]")
    run.put(snapshots.snapshot_path(9_000, "f" * 64), b"[]")
    run.put(audits.audit_path(8), b"[]")
    assert found(run) == set()


# --- a run that goes on ----------------------------------------------------------------------------------------


def test_a_run_in_the_middle(store: MemoryStore) -> None:
    actors = Actors.begin(store)
    assert audit(store).violations == []
    actors.ahead(2)
    actors.scheduler.dispatch(0)
    assert audit(store).violations == []
    actors.train(1)
    report = audit(store)
    assert report.violations == []
    assert (report.versions, report.fates) == (1, {"trained": 2, "committed, waiting": 4})


def test_a_batch_that_was_voided_and_made_again(store: MemoryStore) -> None:
    actors = Actors.begin(store).train(2)
    actors.ahead()
    path = file_of(store, 2)
    store.put(path, b"damaged")
    assert {("altered", path)} == {(v.kind, v.where) for v in audit(store).violations}
    actors.learner.log.follow()
    actors.learner.void(2)
    report = audit(store)
    assert (report.violations, report.fates["discarded: corrupt"]) == ([], 2)
    assert report.quarantined == [f"{entry_path(committed(store, 2).n)}: damaged"]
    actors.scheduler.log.follow()
    actors.scheduler.begin()
    actors.train(1)
    assert audit(store).violations == []
    report = audit(store, deep=True)
    assert (report.violations, report.fates) == ([], {"trained": 6, "discarded: corrupt": 2})


@pytest.mark.parametrize(("damage", "corrupt"), [({(2, 0): "cut", (2, 1): "gone"}, 8), ({(0, 0): "flipped"}, 4)])
def test_what_the_pipeline_quarantines_is_named_and_no_violation(
    store: MemoryStore, damage: dict[tuple[int, int], Damage], corrupt: int
) -> None:
    run_virtual(Pipeline(store, async_ratio=2.0, damage=damage).run())
    report = audit(store, deep=True)
    assert report.violations == []
    voids = [entry.body for entry in of_kind(store, BatchVoided)]
    assert [body.number for body in voids if isinstance(body, BatchVoided)] == [number for number, _ in damage]
    named = [entry_path(body.entry) for body in voids if isinstance(body, BatchVoided)]
    assert [line.split(":")[0] for line in report.quarantined] == named
    assert report.fates["discarded: corrupt"] == corrupt
    assert report.fates["trained"] == 6 * 4


def test_what_deposed_writers_left(store: MemoryStore) -> None:
    actors = Actors.begin(store).train(2)
    store.put(f"policies/00000003/{actors.learner.writer.claim}/weights.safetensors", b"half")
    Supervisor(store)
    store.put(f"trajectories/00000002-{actors.scheduler.writer.claim}-ab.arrow", b"lost")
    again = RealScheduler(store, Log(store).state.newest_claim("supervisor"))
    again.commit()
    assert audit(store).violations == []


class Watched(MemoryStore):
    """Calls `before` with the path of every read."""

    def get(self, path: str) -> bytes:
        WATCHING[self.name](path)
        return super().get(path)


WATCHING: dict[str, Callable[[str], object]] = {}


@pytest.fixture
def watched(store: MemoryStore) -> Watched:
    WATCHING[store.name] = lambda path: None
    return Watched(store.name)


def test_a_run_that_prunes_while_it_is_read(store: MemoryStore, watched: Watched) -> None:
    """What was needed when the log was read is pruned and gone when it is looked for."""
    actors = Actors.begin(store).train(3)
    gone = weights_of(store, 2)

    def before(path: str) -> None:
        if path == gone and store.exists(gone):
            WATCHING[watched.name] = lambda path: None
            actors.train(4)
            assert not store.exists(gone)

    WATCHING[watched.name] = before
    assert Log(store).state.retention.needed("weights", 2, 3)
    report = audit(watched)
    assert (report.violations, report.versions) == ([], 3)
    report = audit(watched)
    assert (report.violations, report.versions) == ([], 7)
    store.delete(weights_of(store, 6))  # and now nobody has pruned it
    assert {(v.kind, v.where) for v in audit(watched, deep=True).violations} == {("missing", weights_of(store, 6))}


def test_a_batch_that_is_voided_while_it_is_read(store: MemoryStore, watched: Watched) -> None:
    actors = Actors.begin(store).train(2)
    actors.ahead()
    path = file_of(store, 2)
    store.put(path, b"damaged")

    def before(found: str) -> None:
        if found == path:
            WATCHING[watched.name] = lambda path: None
            actors.learner.log.follow()
            actors.learner.void(2)

    WATCHING[watched.name] = before
    report = audit(watched)
    assert (report.violations, report.entries) == ([], committed(store, 2).n + 1)
    assert audit(watched).violations == []


def test_an_object_that_is_put_back_while_the_audit_runs(store: MemoryStore, watched: Watched) -> None:
    """Who holds bytes with the committed hash puts them back: looked at again, the batch counts."""
    Actors.begin(store).train(2)
    path = file_of(store, 1)
    data, reads = store.get(path), 0
    store.delete(path)

    def before(found: str) -> None:
        nonlocal reads
        if found == path:
            reads += 1
            if reads == 2:
                store.put(path, data)

    WATCHING[watched.name] = before
    report = audit(watched)
    assert (report.violations, report.trajectories) == ([], 2 * 2 * G)


def test_an_entry_that_is_written_while_its_neighbours_are_read_is_no_gap(store: MemoryStore, watched: Watched) -> None:
    """It was not there when it was asked for, the one behind it was: it is asked for again."""
    Actors.begin(store).train(4)
    forget(store)
    missed: list[str] = []

    def before(path: str) -> None:
        if path == entry_path(7) and not missed:
            missed.append(path)
            raise Missing(path)

    WATCHING[watched.name] = before
    report = audit(watched)
    assert (report.violations, report.versions, len(missed)) == ([], 4, 1)


@pytest.mark.parametrize("what", ["weights", "entry"])
def test_what_cannot_be_read_now_is_no_violation(store: MemoryStore, watched: Watched, what: str) -> None:
    Actors.begin(store).train(2)
    path = entry_path(5) if what == "entry" else weights_of(store, 2)

    def before(found: str) -> None:
        if found == path:
            raise Unreachable(path)

    WATCHING[watched.name] = before
    with pytest.raises(Unreachable):
        audit(watched)
    assert list(store.list("audits")) == []


@pytest.mark.parametrize("what", ["weights", "entry", "batch"])
def test_what_a_store_reads_wrong_time_and_again_is_altered(store: MemoryStore, watched: Watched, what: str) -> None:
    Actors.begin(store).train(2)
    path = {"entry": entry_path(5), "weights": weights_of(store, 2), "batch": file_of(store, 1)}[what]

    def before(found: str) -> None:
        if found == path:
            raise Corrupt(f"{path}: its bytes are not those that were written")

    WATCHING[watched.name] = before
    assert {(v.kind, v.where) for v in audit(watched).violations} == {("altered", path)}


@pytest.mark.long
def test_audits_beside_a_run_that_goes_on_accuse_nobody(store: MemoryStore) -> None:
    actors, stop = Actors.begin(store), threading.Event()
    reports: list[AuditReport] = []

    def look() -> None:
        while not stop.is_set():
            reports.append(audit(store, deep=len(reports) % 2 == 0))

    auditor = threading.Thread(target=look)
    auditor.start()
    try:
        while len(reports) < 12 and auditor.is_alive():
            actors.train(3)
    finally:
        stop.set()
        auditor.join()
    assert len(reports) >= 12
    assert [report.violations for report in reports if not report.clean] == []
    assert len({report.versions for report in reports}) > 2


# --- what the next audit reads ---------------------------------------------------------------------------------


class Counted:
    """Reads of a store, by folder."""

    def __init__(self, watched: Watched) -> None:
        self.name = watched.name
        self.reads: Counter[str] = Counter()

    def __enter__(self) -> Counted:
        WATCHING[self.name] = lambda path: self.reads.update([path.split("/")[0]])
        return self

    def __exit__(self, *of: object) -> None:
        WATCHING[self.name] = lambda path: None


@pytest.mark.parametrize("length", [5, 50])
def test_a_second_audit_reads_only_what_is_new(store: MemoryStore, watched: Watched, length: int) -> None:
    """The same reads after fifty versions as after five."""
    actors = Actors.begin(store).train(length)
    first = audit(watched)
    known = len(read(store))
    actors.train(2, prune=False)
    new = len(read(store)) - known
    assert new == 4
    with Counted(watched) as second:
        report = audit(watched)
    assert report.clean
    assert (report.since, report.entries) == (known, known + 4)
    assert second.reads["log"] <= 1 + 4 + 8  # the one it goes on from, the new ones, and free numbers behind them
    assert second.reads["trajectories"] == 2
    assert second.reads["policies"] == 4  # weights and state of two versions
    assert second.reads["audits"] == 1
    assert second.reads.total() - second.reads["log"] - second.reads["audits"] == 6
    assert report.objects == first.objects + 6
    fresh = audit(watched, deep=True)
    assert replace(report, since=0, bytes=0, objects=0) == replace(fresh, bytes=0, objects=0)
    with Counted(watched) as third:
        assert audit(watched) == replace(report, since=known + 4, bytes=0)
    assert third.reads == {"log": third.reads["log"], "audits": 1}
    assert third.reads["log"] <= 1 + 3


def test_a_batch_that_waited_is_counted_when_it_is_trained_on_and_not_read_again(
    store: MemoryStore, watched: Watched
) -> None:
    actors = Actors.begin(store)
    actors.ahead(2)
    assert audit(watched).trajectories == 0
    actors.learner.log.follow()
    actors.learner.publish()
    with Counted(watched) as second:
        assert audit(watched).trajectories == 2 * G
    assert second.reads["trajectories"] == 0
    assert audit(watched, deep=True).staleness == {0: 2 * G}


def test_an_audit_that_found_something_leaves_nothing(store: MemoryStore, watched: Watched) -> None:
    Actors.begin(store).train(2)
    path = file_of(store, 1)
    data = store.get(path)
    store.put(path, b"damaged")
    assert not audit(store).clean
    assert list(store.list("audits")) == []
    assert not audit(store).clean
    store.put(path, data)
    assert audit(store).clean
    assert len(list(store.list("audits"))) == 1


def test_a_deep_audit_reads_what_an_earlier_one_has_read(store: MemoryStore) -> None:
    Actors.begin(store).train(3)
    assert audit(store).clean
    path = file_of(store, 1)
    data = store.get(path)
    store.put(path, b"damaged")
    assert audit(store).clean
    assert [(v.kind, v.where) for v in audit(store, deep=True).violations] == [("altered", path)]
    assert [(v.kind, v.where) for v in audit(store).violations] == [("altered", path)]  # nobody vouches for it now
    store.put(path, data)
    assert audit(store).clean


@pytest.mark.parametrize("how", ["altered", "other rules", "other fold", "of another entry"])
def test_an_audit_that_cannot_be_trusted_is_none(store: MemoryStore, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    actors = Actors.begin(store).train(3)
    if how.startswith("other "):
        monkeypatch.setattr(audits, "RULES" if how == "other rules" else "FOLD", 0)
    assert audit(store).clean
    monkeypatch.undo()
    [path] = store.list("audits")
    if how == "altered":
        store.put(path, store.get(path).replace(b'"run":"test"', b'"run":"tent"'))
    if how == "of another entry":
        store.put(audits.audit_path(3), store.get(path))
        store.delete(path)
    actors.train(1)
    report = audit(store)
    assert (report.clean, report.since, report.run) == (True, 0, "test")


def test_only_the_newest_audits_stay(store: MemoryStore) -> None:
    actors = Actors.begin(store)
    for _ in range(audits.KEPT + 2):
        assert audit(actors.train(1).learner.store).clean
    assert len(list(store.list("audits"))) == audits.KEPT


def test_only_so_many_bytes_are_read_at_once(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before one more is begun as many have ended as there is no room for beside it; one alone may be larger."""
    monkeypatch.setattr(objects, "MOST_BYTES", 10)
    ended: list[objects.Looked] = []
    before = []
    with objects.Looking(store, ended.append) as looking:
        for size in (6, 4, 1, 20, 3):
            stored = StoredObject(f"of-{size}", size, store.put(f"of-{size}", b"x" * size))
            looking.add(objects.Named(stored, 0, "run"), Rules(0.0, 1, 1))
            before.append(len(ended))
        looking.finish()
    assert before == [0, 0, 1, 3, 4]
    assert [looked.size for looked in ended] == [6, 4, 1, 20, 3]


def test_progress(run: MemoryStore) -> None:
    told: list[Progress] = []
    report = audit(run, deep=True, progress=told.append)
    assert told[-1] == Progress(report.entries, report.entries, report.objects, report.objects, report.bytes)
    assert [one.entries for one in told] == sorted(one.entries for one in told)
    assert [one.bytes for one in told] == sorted(one.bytes for one in told)
    assert report.bytes == sum(
        run.stat(path).size for path in run.list() if path.startswith(("policies", "trajectories"))
    )
