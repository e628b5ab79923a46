"""Tests of a batch's optional columns: they are packed, written and read, or they are absent."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage import optional_columns
from rollflow.storage.audit.rows import count_rows
from rollflow.storage.batch import SCHEMA, TrajectoryBatch, pack_group
from rollflow.storage.errors import Corrupt
from rollflow.storage.model_input import ForeignPart, PlacedPart
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import Branch, Outcome, Trajectory, TrajectoryGroup
from rollflow.storage.token_arrays import Float32s, Int16s, Int64s, TokenSets
from tests.support.batches import group, ready, staged

TEXT = st.text(max_size=5)
INT16, INT32 = st.integers(-(1 << 15), (1 << 15) - 1), st.integers(-(1 << 31), (1 << 31) - 1)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "reward_parts": st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=3),
    "outcome": st.sampled_from(Outcome),
    "turn_starts": st.lists(INT32, max_size=4).map(tuple),
    "branch": st.builds(Branch, INT32, INT32),
    "routed_experts": st.lists(INT16, max_size=6).map(Int16s.of),
    "kept_tokens": st.lists(st.lists(INT32, max_size=3), max_size=4).map(TokenSets.of),
    "foreign_parts": st.lists(st.builds(PlacedPart, INT32, st.builds(ForeignPart, TEXT, TEXT, INT32)), max_size=2).map(
        tuple
    ),
    "scorer_version": TEXT,
    "token_rewards": st.lists(st.floats(width=32, allow_nan=False) | st.just(math.nan), max_size=6).map(Float32s.of),
    "turn_states": st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=4).map(Int64s.of),
    "role": TEXT,
    "left_out": st.booleans(),
}
ROW = st.fixed_dictionaries({}, optional=VALUES)
BARE = (group(0), group(1), group(2))


def with_values(rows: Sequence[dict[str, Any]]) -> list[TrajectoryGroup]:
    """Return groups of two trajectories, each with the optional values of one row."""
    found = []
    for number in range(0, len(rows), 2):
        bare = group(number // 2)
        made = [replace(one, **rows[number + place]) for place, one in enumerate(bare.trajectories)]
        found.append(replace(bare, trajectories=tuple(made)))
    return found


def written(groups: Sequence[TrajectoryGroup]) -> TrajectoryBatch:
    """Write and read a batch; packed and unpacked groups must give the same file."""
    data = TrajectoryBatch.from_groups(groups).to_bytes()
    packed = TrajectoryBatch.from_groups([pack_group(one) for one in groups])
    packed.table.validate(full=True)
    assert packed.to_bytes() == data
    return TrajectoryBatch.from_bytes(data)


@settings(max_examples=100, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=4).map(lambda rows: [*rows, *rows]))
def test_optional_columns_of_a_batch_are_read_as_written(rows: list[dict[str, Any]]) -> None:
    groups, present = with_values(rows), {name for row in rows for name in row}
    batch = written(groups)
    assert batch.groups() == groups
    assert batch.table.schema.names == [*SCHEMA.names, *(name for name in VALUES if name in present)]
    assert batch.branches == ["branch" in row for row in rows]


def test_batch_without_optional_values_has_no_optional_columns() -> None:
    batch = written(BARE)
    assert batch.table.schema.equals(SCHEMA, check_metadata=True)
    assert all(batch.optional(name) is None for name in optional_columns.NAMES)
    assert pack_group(BARE[0]).optional == {}
    [one, _] = batch.groups()[0].trajectories
    assert {getattr(one, name) for name in optional_columns.NAMES} == {None}


WITHOUT_PANDAS = """
import sys
from rollflow.storage.batch import TrajectoryBatch, pack_group
from rollflow.storage.records import Branch
from rollflow.tasks.actors.batch_metrics import compute_domain_metrics
from rollflow.tasks.objectives.rows import BatchRows
from tests.storage.test_optional_columns import BARE, with_values
values = {"reward_parts": {"a": 1.0}, "outcome": "correct", "scorer_version": "1", "turn_starts": (1, 2)}
packed = [pack_group(one) for one in with_values([values, {"branch": Branch(0, 1)}])]
batch = TrajectoryBatch.from_bytes(TrajectoryBatch.from_groups(packed).to_bytes())
BatchRows.of(batch)
compute_domain_metrics(batch, ["a", "b"])
assert len(batch.episode_rewards) == 1
assert "pandas" not in sys.modules, "pandas"
"""


def test_batches_are_packed_and_read_without_pandas() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PANDAS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_optional_column_has_a_test_value() -> None:
    assert tuple(VALUES) == optional_columns.NAMES
    assert set(VALUES) < set(Trajectory.__dataclass_fields__)


def file_with(name: str, values: Any, kind: pa.DataType | None = None) -> pa.Buffer:
    """Return the file of a batch of two rows, with one additional column."""
    table = TrajectoryBatch.from_groups(BARE[:1]).table
    kind = kind or next(field.type for field in optional_columns.COLUMNS if field.name == name)
    return TrajectoryBatch(table.append_column(pa.field(name, kind), pa.array(values, kind))).to_bytes()


@pytest.mark.parametrize(
    ("name", "values", "kind"),
    [
        ("another", [1, 2], pa.int32()),
        ("outcome", ["wrong", None], pa.utf8()),
        ("turn_starts", [[1], None], pa.list_(pa.int64())),
    ],
)
def test_unknown_column_of_a_batch_file_is_corrupt(name: str, values: list[Any], kind: pa.DataType) -> None:
    with pytest.raises(Corrupt, match="columns of the batch differ from those of trajectory schema 1"):
        TrajectoryBatch.from_bytes(file_with(name, values, kind))


def test_column_stored_twice_in_a_batch_file_is_corrupt() -> None:
    table = TrajectoryBatch.from_bytes(file_with("turn_starts", [[1], None])).table
    twice = table.append_column(table.schema.field("turn_starts"), table["turn_starts"])
    with pytest.raises(Corrupt, match="columns of the batch differ from those of trajectory schema 1"):
        TrajectoryBatch.from_bytes(TrajectoryBatch(twice).to_bytes())


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("reward_parts", [None, [("x", None)]]),
        ("turn_starts", [[1, None], None]),
        ("branch", [None, {"parent": 0, "position": None}]),
        ("routed_experts", [None, [None]]),
        ("kept_tokens", [[[1, None]], None]),
        ("kept_tokens", [[[1], None], None]),
        ("foreign_parts", [None, [{"position": 0, "length": 1, "kind": None, "sha256": ""}]]),
        ("token_rewards", [None, [0.5, None]]),
        ("turn_states", [None, [5, None]]),
    ],
)
def test_null_inside_of_an_optional_value_is_corrupt(name: str, values: list[Any]) -> None:
    with pytest.raises(Corrupt, match="a column of the batch contains null values"):
        TrajectoryBatch.from_bytes(file_with(name, values))


def test_optional_column_of_only_nulls_is_readable() -> None:
    for field in optional_columns.COLUMNS:
        batch = TrajectoryBatch.from_bytes(file_with(field.name, [None, None]))
        assert batch.groups() == [BARE[0]]


def test_unknown_outcome_in_a_batch_file_is_corrupt() -> None:
    batch = TrajectoryBatch.from_bytes(file_with("outcome", ["wrong", "fine"]))
    with pytest.raises(Corrupt, match=r"has the outcome 'fine'; expected one of \['correct', 'partial'"):
        batch.groups()


def test_too_many_optional_values_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def overflow(arrays: list[pa.Array]) -> pa.Array:
        raise pa.ArrowInvalid("offset overflow while concatenating arrays")

    monkeypatch.setattr(optional_columns.pa, "concat_arrays", overflow)
    with pytest.raises(OverflowError, match="an optional column of this batch has more values than Arrow can store"):
        TrajectoryBatch.from_groups(with_values([{"turn_starts": (1,)}, {}]))


def test_commit_does_not_count_a_branch_as_a_row(memory: MemoryStore) -> None:
    batches, writer = ready(memory)
    first, *others = staged().groups
    assert isinstance(first, TrajectoryGroup)
    branch = replace(first.trajectories[1], sample=9, branch=Branch(1, 1))
    grown = replace(first, trajectories=(*first.trajectories, branch))
    entry, _ = batches.commit(writer, replace(staged(), groups=(grown, *others)))
    body = batches.read_commit(entry.n)
    assert body.rows == 4
    batch = TrajectoryBatch.from_bytes(batches.read(body.file))
    assert (len(batch), batch.episodes, count_rows(batch, 0).staleness.total()) == (5, 4, 4)
