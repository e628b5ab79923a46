"""Tests that an audit reports each fault of a batch by kind and path: a fault in the batch file, in the log entry, or a
difference between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rollflow.storage.audit.audit import audit
from rollflow.storage.log.entries import BatchCommitted, TrainedGroup, entry_path
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import StoredObject, TrajectoryGroup
from tests.support.audited import VERSIONS, file_of, found, of_first
from tests.support.log_runs import Actors, G, changed, committed, rebatched


def test_audit_finds_a_prompt_with_missing_responses(run: MemoryStore) -> None:
    path = rebatched(run, 3, lambda groups: [replace(groups[0], trajectories=groups[0].trajectories[:1]), groups[1]])
    assert found(run) == {("missing", path)}
    report = audit(run)
    assert "has 1 of 4 samples; sample numbers: [0]" in report.violations[0].what
    assert report.trajectories == (VERSIONS - 1) * 2 * G  # trajectories of a faulty batch are not counted


@pytest.mark.parametrize(("samples", "told"), [((0, 0, 0, 0), "{0: 4}"), ((3, 1, 2, 3), "{3: 2}")])
def test_audit_finds_a_repeated_response(run: MemoryStore, samples: tuple[int, ...], told: str) -> None:
    def again(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
        made = groups[1].trajectories
        return [groups[0], replace(groups[1], trajectories=tuple(made[sample] for sample in samples))]

    path = rebatched(run, 3, again)
    assert found(run) == {("duplicate", path)}
    assert f"has the same sample more than once; number of copies by sample: {told}" in audit(run).violations[0].what


@pytest.mark.parametrize("sample", [-1, 4])
@pytest.mark.parametrize("rollout", [{"redundant_responses": 0}, {}])
def test_audit_finds_a_response_that_was_not_requested(
    store: MemoryStore, sample: int, rollout: dict[str, int]
) -> None:
    Actors.begin(store, rollout=rollout).train(2)
    path = rebatched(store, 1, lambda groups: [of_first(groups[0], sample=sample), groups[1]])
    assert found(store) == {("altered", path)}


def test_audit_finds_an_additional_response_to_a_prompt(run: MemoryStore) -> None:
    path = rebatched(run, 3, lambda groups: [all_five(groups[0]), groups[1]])
    assert found(run) == {("altered", path)}


def all_five(group: TrajectoryGroup) -> TrajectoryGroup:
    """Return the group with one additional sample."""
    first, *others = group.trajectories
    return replace(group, trajectories=(replace(first, sample=0), *others, replace(first, sample=4)))


# the second config key is an earlier name of the first one
@pytest.mark.parametrize("key", ["redundant_responses", "extra_responses"])
def test_audit_accepts_a_redundant_response_in_place_of_another(store: MemoryStore, key: str) -> None:
    Actors.begin(store, rollout={key: 1}).train(2)
    rebatched(store, 1, lambda groups: [of_first(group, sample=4) for group in groups])
    assert found(store) == set()
    path = rebatched(store, 1, lambda groups: [of_first(group, sample=5) for group in groups])
    assert found(store) == {("altered", path)}
    rebatched(store, 1, lambda groups: [of_first(groups[0], sample=0), all_five(groups[1])])
    assert found(store) == {("altered", path)}


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
def test_audit_finds_wrong_counts_and_versions_in_a_log_entry(
    run: MemoryStore, false: Callable[[TrainedGroup], TrainedGroup]
) -> None:
    entry = committed(run, 3)
    changed(run, entry.n, lambda body: replace(body, groups=(body.groups[0], false(body.groups[1]))))
    assert found(run) == {("lineage", file_of(run, 3))}


def test_audit_finds_a_wrong_start_version_in_a_batch_file(run: MemoryStore) -> None:
    """The start version in the file is first newer, and then older, than that of the tokens and of the log entry."""
    path = rebatched(run, 3, lambda groups: [groups[0], of_all(groups[1], started_version=2)])
    assert found(run) == {("lineage", path), ("stale", path)}
    path = rebatched(run, 3, lambda groups: [groups[0], of_all(groups[1], started_version=0)])
    assert found(run) == {("lineage", path)}


def test_audit_finds_a_single_too_old_trajectory(run: MemoryStore) -> None:
    """The batch file shows the stale trajectory, but the log entry does not."""
    path = rebatched(run, 5, lambda groups: [of_first(groups[0], started_version=1), groups[1]])
    assert found(run) == {("lineage", path), ("stale", path)}
    assert "batch 5 has a trajectory of staleness 4, more than async_ratio = 3" in {
        v.what for v in audit(run).violations
    }


def test_audit_finds_a_wrong_start_version_in_file_and_log(run: MemoryStore) -> None:
    """The batch file and the log entry agree on a start version, but the tokens were sampled by older versions."""
    path = rebatched(run, 3, lambda groups: [groups[0], of_all(groups[1], started_version=2)])
    changed(run, committed(run, 3).n, lambda body: replace(body, groups=(body.groups[0], said(body, started=2))))
    assert found(run) == {("stale", path)}


def said(body: BatchCommitted, **change: int) -> TrainedGroup:
    """Return the record of the second group in the batch's log entry, with changed fields."""
    return body.groups[1]._replace(**change)


def of_all(group: TrajectoryGroup, **change: object) -> TrajectoryGroup:
    """Return the group with all trajectories changed."""
    return replace(group, trajectories=tuple(replace(t, **change) for t in group.trajectories))  # type: ignore[arg-type]


def test_audit_finds_tokens_of_a_future_policy_version(run: MemoryStore) -> None:
    """First, only the batch file has tokens of a future version. Then the log entry also names that version."""

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
def test_audit_finds_impossible_values(run: MemoryStore, change: dict[str, object], kind: str) -> None:
    path = rebatched(run, 3, lambda groups: [groups[0], of_first(groups[1], **change)])
    assert found(run) == {(kind, path)}


def test_audit_finds_a_too_old_trajectory_without_tokens(run: MemoryStore) -> None:
    late = {"started_version": 3, "loss_mask": (False, False, False)}
    path = rebatched(run, 3, lambda groups: [groups[0], of_first(groups[1], **late)])
    assert found(run) == {("lineage", path), ("stale", path)}
    assert "a trajectory was started under version 3, but version 2 was the newest when its batch was committed" in {
        v.what for v in audit(run).violations
    }


def test_audit_finds_an_altered_loss_mask(run: MemoryStore) -> None:
    path = rebatched(run, 3, lambda groups: [groups[0], of_first(groups[1], loss_mask=(False, False, True))])
    assert found(run) == {("lineage", path)}


def test_group_without_tokens_has_its_start_as_newest_version(run: MemoryStore) -> None:
    """The group is the last one of its batch."""
    none = {"tokens": (1, 2), "loss_mask": (False, False), "logprobs": (0.0, 0.0), "versions": (-1, -1)}
    rebatched(run, 3, lambda groups: [groups[0], of_all(groups[1], **none)])
    body = committed(run, 3).body
    assert isinstance(body, BatchCommitted)
    silent = said(body, newest=body.groups[1].started, tokens=0)
    changed(run, committed(run, 3).n, lambda body: replace(body, groups=(body.groups[0], silent)))
    assert found(run) == set()


def test_audit_finds_swapped_batch_files(run: MemoryStore) -> None:
    one, other = file_of(run, 2), file_of(run, 3)
    first, second = run.get(one), run.get(other)
    run.put(one, second)
    run.put(other, first)
    assert found(run) == {("altered", one), ("altered", other)}


def test_audit_finds_log_entries_that_name_swapped_files(run: MemoryStore) -> None:
    """Sizes and hashes match, but the contents of the files differ from those that the log entries describe."""
    second, third = committed(run, 2), committed(run, 3)
    assert isinstance(second.body, BatchCommitted)
    assert isinstance(third.body, BatchCommitted)
    files = second.body.file, third.body.file
    changed(run, second.n, lambda body: replace(body, file=files[1]))
    changed(run, third.n, lambda body: replace(body, file=files[0]))
    assert found(run) >= {("altered", files[0].path), ("altered", files[1].path)}


@pytest.mark.parametrize(("how", "kind"), [("flipped", "altered"), ("cut", "altered"), ("gone", "missing")])
def test_audit_finds_a_damaged_batch_file(run: MemoryStore, how: str, kind: str) -> None:
    path = file_of(run, 4)
    data = bytearray(run.get(path))
    if how == "flipped":
        data[len(data) // 2] ^= 1
    run.put(path, bytes(data[:-9] if how == "cut" else data))
    if how == "gone":
        run.delete(path)
    assert found(run) == {(kind, path)}


def test_audit_finds_a_batch_file_that_contains_no_batch(run: MemoryStore) -> None:
    entry = committed(run, 3)
    file = StoredObject(file_of(run, 3), 5, run.put(file_of(run, 3), b"words"))
    changed(run, entry.n, lambda body: replace(body, file=file))
    assert found(run) == {("altered", file.path)}
