"""Tests of the trajectory store's guarantees for commits and voids (revoked batches), on every object store that needs
no server.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.batch import SCHEMA, TrajectoryBatch
from rollflow.storage.errors import Conflict, Corrupt, Stale
from rollflow.storage.log.entries import BatchCommitted, BatchVoided, entry_path
from rollflow.storage.log.run_log import Log, Writer
from rollflow.storage.log.state import Deposed, EntryRefused
from rollflow.storage.objects import ObjectStore
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import Cursor, Discard, DiscardReason, GroupKey, StoredObject
from rollflow.storage.trajectories import StagedBatch, TrajectoryStore, verify
from tests.support.batches import begin, file_of, group, learning, publish, ready, scheduling, staged, train
from tests.support.log_runs import of_kind
from tests.support.together import together


def content(committed: Path | pa.Buffer) -> pa.Buffer:
    """Return the bytes of the batch that a commit returned as a path or as bytes."""
    return pa.py_buffer(committed.read_bytes()) if isinstance(committed, Path) else committed


def again(run: ObjectStore, writer: Writer) -> tuple[TrajectoryStore, Writer]:
    """Return a writer with the same claim and its own view of the run."""
    log = Log(run)
    return TrajectoryStore(log), Writer(log, writer.role, writer.claim)


def test_batch_is_read_as_committed(run: ObjectStore) -> None:
    batches, writer = ready(run)
    entry, data = batches.commit(writer, staged())
    body, other = entry.body, TrajectoryStore(Log(run))
    assert isinstance(body, BatchCommitted)
    assert other.read_commit(entry.n) == body
    assert other.read(body.file).equals(content(data))
    assert tuple(TrajectoryBatch.from_bytes(other.read(body.file)).groups()) == staged().groups
    assert (body.issued, body.discards, body.rows) == ((0, 1, 2), staged().discards, 4)
    assert [(one.key, one.started, one.newest, one.tokens) for one in body.groups] == [
        (GroupKey(0, 0), 0, 0, 4),
        (GroupKey(1, 0), 0, 0, 4),
    ]
    waiting = other.find_waiting(0)
    assert waiting is not None
    assert (waiting.entry, waiting.file, waiting.groups) == (entry.n, body.file, body.groups)
    state = other.log.state
    assert (state.cursor, state.in_flight, state.next_batch) == (Cursor((3,), (0,)), (GroupKey(2, 1),), 1)


def test_batch_number_is_committed_once(run: ObjectStore) -> None:
    """A second commit changes nothing, whether its writer has the same claim or another one."""
    first, writer = ready(run)
    entry, data = first.commit(writer, staged())
    before = run.get(entry_path(entry.n))
    with pytest.raises(Conflict, match="batch 0 cannot be formed now"):
        first.commit(writer, staged())
    second, other = scheduling(run)
    with pytest.raises(Conflict, match="batch 0 cannot be formed now"):
        second.commit(other, staged())
    with pytest.raises(Deposed):
        first.commit(writer, staged(1, 1))
    assert run.get(entry_path(entry.n)) == before
    assert second.read(file_of(second, 0)).equals(content(data))
    assert list(run.list("trajectories")) == [file_of(second, 0).path]


def test_batch_file_without_a_log_entry_is_ignored(run: ObjectStore) -> None:
    """If the writer is killed between the two writes, there is no batch, and the next commit succeeds."""
    first, writer = ready(run)
    run.put(f"trajectories/00000000-{writer.claim}-0a1b2c3d.arrow", b"half a fi")
    assert first.find_waiting(0) is None
    assert first.log.state.next_batch == 0
    second, other = scheduling(run)
    entry, _ = second.commit(other, staged())
    assert first.find_waiting(0) == second.find_waiting(0)
    assert second.read_commit(entry.n).number == 0


def test_log_entry_of_another_kind_commits_no_batch(run: ObjectStore) -> None:
    batches, writer = ready(run)
    for n in (0, writer.claim, writer.claim + 1):
        with pytest.raises(Corrupt, match=f"entry {n} of .* should commit a batch"):
            batches.read_commit(n)


def test_stale_groups_are_refused_before_anything_is_written(run: ObjectStore) -> None:
    """At alpha 1, batch 2 accepts groups that were started under version 1, but not under version 0."""
    begin(run, 1.0)
    train(run, 3)
    batches, writer = scheduling(run)
    files = list(run.list("trajectories"))
    stale, fresh = staged(2, 0), staged(2, 1)
    with pytest.raises(
        Stale,
        match="version 0, but with async_ratio = 1 batch 2 takes only groups that were started under version 1",
    ):
        batches.commit(writer, stale)
    assert list(run.list("trajectories")) == files
    batches.commit(writer, fresh)
    assert batches.find_waiting(2) is not None


@pytest.mark.parametrize("damage", [lambda d: d[:-9], lambda d: d + b"x", lambda d: bytes([d[0] ^ 1]) + d[1:]])
def test_damaged_batch_error_names_the_file(run: ObjectStore, damage: Callable[[bytes], bytes]) -> None:
    batches, writer = ready(run)
    batches.commit(writer, staged())
    file = file_of(batches, 0)
    run.put(file.path, damage(run.get(file.path)))
    with pytest.raises(Corrupt, match=f"{file.path} does not have the content that its log entry names"):
        batches.read(file)
    run.delete(file.path)
    with pytest.raises(Corrupt, match=f"{file.path} is missing"):
        batches.read(file)


def arrow_file(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


GOOD = TrajectoryBatch.from_groups((group(0), group(1))).table
REWARD = SCHEMA.get_field_index("reward")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a readable Arrow file"),
        (b"PAR1 something else", "not a readable Arrow file"),
        (arrow_file(GOOD).to_pybytes()[:-20], "not a readable Arrow file"),  # the footer is cut off
        (arrow_file(pa.table({"x": [1]})), "trajectory schema none, but this version"),
        (arrow_file(GOOD.replace_schema_metadata({b"rollflow.schema": b"2"})), "trajectory schema 2, but this version"),
        (arrow_file(GOOD.drop_columns("reward")), "columns of the batch differ from those of trajectory schema 1"),
        (
            arrow_file(GOOD.set_column(REWARD, "reward", GOOD["reward"].cast(pa.float64()))),
            "columns of the batch differ from those of trajectory schema 1",
        ),
        (arrow_file(GOOD.set_column(REWARD, SCHEMA.field(REWARD), pa.nulls(4, pa.float32()))), "contains null values"),
    ],
)
def test_file_that_is_not_an_arrow_batch_is_corrupt(data: bytes | pa.Buffer, message: str) -> None:
    with pytest.raises(Corrupt, match=message):
        TrajectoryBatch.from_bytes(data)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=8),
    st.integers(0, 4000),
    st.integers(0, 4000),
)
def test_random_damage_of_a_batch_file_is_detected_or_harmless(
    flips: list[tuple[int, int]], start: int, cut: int
) -> None:
    """Reading any bytes returns a batch or raises `Corrupt`, and never raises another error."""
    data = bytearray(arrow_file(GOOD).to_pybytes())
    for place, value in flips:
        data[place % len(data)] = value
    damaged = bytes(data[:start] + data[start + cut % 9 :])
    try:
        batch = TrajectoryBatch.from_bytes(damaged)
    except Corrupt:
        return
    assert len(batch.table.to_pylist()) == len(batch)


# --- voided (revoked) batches ----------------------------------------------------------------------------------


def test_voided_batch_is_formed_again(run: ObjectStore) -> None:
    first, scheduler = ready(run)
    _, learner = learning(run)
    other = TrajectoryStore(learner.log)
    entry, data = first.commit(scheduler, staged())
    assert not first.void(scheduler, 0, "a good batch is not voided")
    run.put(file_of(first, 0).path, content(data).to_pybytes()[:-1])
    assert other.void(learner, 0, "too short")
    assert not other.void(learner, 0, "again")
    assert not first.void(scheduler, 0, "and again")
    assert [found.body for found in of_kind(run, BatchVoided)] == [BatchVoided(0, entry.n, "too short")]
    assert first.find_waiting(0) is None
    with pytest.raises(EntryRefused, match=r"attempt 0 of prompt .* is not open"):
        first.commit(scheduler, replace(staged(), issued=(), discards=()))  # a voided batch stays voided
    second, data = first.commit(scheduler, staged(attempt=1))
    assert second.n > entry.n
    assert other.read(file_of(other, 0)).equals(content(data))
    assert other.read_commit(entry.n).groups[0].key == GroupKey(0, 0)
    assert other.read_commit(second.n).groups[0].key == GroupKey(0, 1)


def test_batch_that_the_learner_rejects_is_voided(run: ObjectStore) -> None:
    batches, writer = ready(run)
    _, learner = learning(run)
    entry, _ = batches.commit(writer, staged())
    assert batches.reject(learner, 0, entry.n, "a log-prob is -inf")
    assert not batches.reject(learner, 0, entry.n, "again")
    [void] = of_kind(run, BatchVoided)
    assert void.body == BatchVoided(0, entry.n, "a log-prob is -inf", "not-finite")
    second, _ = batches.commit(writer, staged(attempt=1))
    assert not batches.reject(learner, 0, entry.n, "the one before")
    assert batches.read_commit(second.n).groups[0].key == GroupKey(0, 1)
    assert run.exists(batches.read_commit(entry.n).file.path)


def test_log_state_counts_how_often_a_prompt_was_resampled(memory: MemoryStore) -> None:
    """The count of a prompt ends when the prompt is trained on or filtered. The rejected batches since the newest
    version are also counted.
    """
    batches, writer = ready(memory)
    policies, learner = learning(memory)

    def known() -> tuple[dict[int, int], int]:
        batches.log.follow()
        return batches.log.state.redraws, batches.log.state.not_finite

    for attempt in range(2):
        entry, _ = batches.commit(writer, staged(attempt=attempt))
        prompts = [group.prompt for group in batches.read_commit(entry.n).groups]
        batches.reject(learner, 0, entry.n, "nan")
        assert known() == (dict.fromkeys(prompts, attempt + 1), attempt + 1)
    entry, _ = batches.commit(writer, staged(attempt=2))
    memory.delete(file_of(batches, 0).path)
    assert batches.void(writer, 0, "gone")
    assert known() == (dict.fromkeys(prompts, 2), 2)  # prompts of damaged batches keep their seeds
    batches.commit(writer, staged(attempt=3))
    assert known() == (dict.fromkeys(prompts, 2), 2)
    publish(policies, learner)
    assert known() == ({}, 0)
    entry, _ = batches.commit(writer, staged(1, 1))
    batches.reject(learner, 1, entry.n, "nan")
    assert list(known()[0].values()) == [1] * len(batches.read_commit(entry.n).groups)
    gone = tuple(Discard(GroupKey(prompt, 1), DiscardReason.FILTERED, 0, 5) for prompt in known()[0])
    others = staged(2, 1)
    batches.commit(writer, replace(others, number=1, discards=(*gone, *others.discards)))
    assert known() == ({}, 1)


def test_discarded_groups_include_those_of_voided_batches(run: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch 1 of three is damaged twice, and each of its commits lists other discarded groups."""
    batches, writer = ready(run, async_ratio=2)
    for number in range(3):
        batches.commit(writer, staged(number))
    made = [batches.log.state.waiting[1].entry]
    gone = tuple(Discard(GroupKey(2, attempt), DiscardReason.STALE, 0, 5 + attempt) for attempt in (1, 2))
    for attempt, discard in enumerate(gone, 1):
        run.delete(file_of(batches, 1).path)
        assert batches.void(writer, 1, "gone")
        entry, _ = batches.commit(writer, replace(staged(1, attempt=attempt), discards=(discard,)))
        made.append(entry.n)
    first, other = staged(1).discards, TrajectoryStore(Log(run))
    assert [other.discards(entry) for entry in made] == [first, first + gone[:1], first + gone]
    for number in (0, 2):  # these batches were committed before the voided batch, and between its two commits
        assert other.discards(other.log.state.waiting[number].entry) == staged(number).discards


def test_discarded_groups_of_an_intact_batch_need_one_read(memory: MemoryStore) -> None:
    batches, writer = ready(memory, async_ratio=5)
    for number in range(5):
        batches.commit(writer, staged(number))
    for number in range(4):
        memory.delete(entry_path(batches.log.state.waiting[number].entry))
    assert batches.discards(batches.log.state.waiting[4].entry) == staged(4).discards


def test_racing_voids_of_a_batch_append_one_log_entry(run: ObjectStore) -> None:
    batches, scheduler = ready(run, async_ratio=9)
    _, learner = learning(run)
    for number in range(10):
        batches.commit(scheduler, staged(number))
        run.delete(file_of(batches, number).path)
        views = [again(run, writer) for writer in (scheduler, learner, scheduler, learner)]
        together(*(lambda view=view, number=number: view[0].void(view[1], number, "gone") for view in views))
    assert [found.body.number for found in of_kind(run, BatchVoided)] == list(range(10))  # type: ignore[union-attr]
    batches.log.follow()
    assert batches.log.state.holes == list(range(10))


def test_replaced_process_cannot_void_a_batch(run: ObjectStore) -> None:
    batches, writer = ready(run)
    batches.commit(writer, staged())
    scheduling(run)
    run.delete(file_of(batches, 0).path)
    with pytest.raises(Deposed):
        batches.void(writer, 0, "gone")
    assert batches.find_waiting(0) is not None


def test_batch_that_was_trained_on_is_not_voided(run: ObjectStore) -> None:
    batches, writer = ready(run)
    batches.commit(writer, staged())
    file = file_of(batches, 0)
    policies, learner = learning(run)
    publish(policies, learner)
    run.delete(file.path)
    assert not batches.void(writer, 0, "gone")
    assert of_kind(run, BatchVoided) == []


def test_batch_void_that_loses_a_race_has_no_effect(memory: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner trains on the batch after its file was checked and before the log entry is appended."""
    batches, writer = ready(memory)
    batches.commit(writer, staged())
    policies, learner = learning(memory)
    memory.delete(file_of(batches, 0).path)
    looked = TrajectoryStore._is_whole

    def look(self: TrajectoryStore, file: StoredObject) -> bool:
        publish(policies, learner)
        return looked(self, file)

    monkeypatch.setattr(TrajectoryStore, "_is_whole", look)
    assert not batches.void(writer, 0, "gone")
    assert (batches.log.state.version, batches.log.state.voids) == (1, 0)


def test_verify_compares_the_batch_file_with_its_log_entry(run: ObjectStore) -> None:
    batches, writer = ready(run)
    _, data = batches.commit(writer, staged())
    file, whole = file_of(batches, 0), content(data).to_pybytes()
    verify(file, whole)
    for other in (whole[:-1] + b"?", whole[:-1], whole + b"?"):
        with pytest.raises(Corrupt, match=file.path):
            verify(file, other)


def test_void_during_a_commit_gives_no_prompt_two_outcomes(run: ObjectStore) -> None:
    """The groups that the scheduler is about to commit stay open and are committed. The groups of the voided batch are
    open again.
    """
    batches, writer = ready(run, async_ratio=2)
    _, learner = learning(run)
    for number in range(2):
        batches.commit(writer, staged(number))
    run.delete(file_of(batches, 1).path)
    _, view = again(run, writer)
    assert TrajectoryStore(learner.log).void(learner, 1, "gone")
    TrajectoryStore(view.log).commit(view, staged(2))
    batches.log.follow()
    state = batches.log.state
    assert (state.holes, state.next_batch, state.voids) == ([1], 3, 1)
    assert sorted(state.waiting) == [0, 2]
    assert set(state.in_flight) == {GroupKey(prompt, 1) for prompt in (2, 3, 4, 5, 8)}
    assert state.totals.groups == {"stale": 3, "corrupt": 2}
    batches.commit(writer, staged(1, attempt=1))
    assert (batches.log.state.holes, sorted(batches.log.state.waiting)) == ([], [0, 1, 2])


def test_voiding_a_batch_keeps_the_prompt_cursor(run: ObjectStore) -> None:
    """With two prompt sources, batch 1 of three is lost. Its group and the groups in flight are open, but filtered
    groups are not.
    """
    batches, writer = ready(run, async_ratio=2, sources=2)
    groups, filtered = ((0, 1), (2,), (6,)), ((3,), (4, 5), (8,))  # prompts of each batch
    issued = (0, 1, 2, 3), (4, 5, 6), (8, 10)
    for number, prompts in enumerate(groups):
        gone = tuple(Discard(GroupKey(prompt, 0), DiscardReason.FILTERED, 0, 7) for prompt in filtered[number])
        batches.commit(writer, StagedBatch(number, tuple(map(group, prompts)), issued[number], gone))
    before = batches.log.state
    run.put(file_of(batches, 1).path, b"rotten")
    batches.void(writer, 1, "rotten")
    state = batches.log.state
    assert state.cursor == before.cursor == Cursor((6, 3), (2, 2))
    assert before.in_flight == (GroupKey(10, 0),)
    assert set(state.in_flight) == {GroupKey(2, 1), GroupKey(10, 0)}
    assert state.totals.groups == {"filtered": 4, "corrupt": 1}


def test_prompt_cursor_matches_a_hand_calculation() -> None:
    cursor = Cursor((3, 1), (0, 1))
    assert cursor.upcoming == (6, 3)
    assert [index for index in range(9) if cursor.covers(index)] == [0, 1, 2, 4]
    assert not Cursor().covers(0)
    with pytest.raises(
        ValueError, match="the cursor has counts of issued prompts for 2 sources, but of filtered prompts for 1"
    ):
        Cursor((3, 1), (0,))
