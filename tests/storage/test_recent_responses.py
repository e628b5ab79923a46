"""Tests that the newest responses of a run are read from its committed batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.log.run_log import Log
from rollflow.storage.model_input import NO_TOKEN
from rollflow.storage.objects import ObjectStore
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.recent_responses import RecentResponses, list_responses
from rollflow.storage.records import GroupKey, StopReason, Trajectory, TrajectoryGroup
from rollflow.storage.trajectories import StagedBatch, TrajectoryStore
from tests.support.batches import ready


def pack(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def answer(sample: int, tokens: tuple[int, ...], mask: tuple[bool, ...]) -> Trajectory:
    logprobs, versions = (tuple(value if own else other for own in mask) for value, other in ((-0.5, 0.0), (0, -1)))
    return Trajectory(sample, 0, tokens, mask, logprobs, versions, 1.0, "", StopReason.STOP)


def batch(number: int) -> StagedBatch:
    """Build a batch with one prompt and two answers. The prompt is the token 40 and the batch's number; the answers
    also contain the number.
    """
    mask = (False, False, True, True, True)
    made = tuple(answer(sample, (40, number, 7, number, sample), mask) for sample in (0, 1))
    return StagedBatch(number, (TrajectoryGroup(GroupKey(number, 0), f"p{number}", "test", made),), (number,))


def rows(number: int) -> list[tuple[bytes, bytes]]:
    return [(pack(40, number), pack(7, number, sample)) for sample in (0, 1)]


def test_each_response_is_read_once_and_oldest_first(run: ObjectStore) -> None:
    batches, writer = ready(run, async_ratio=9)
    recent = RecentResponses(TrajectoryStore(Log(run)), 1000)
    assert recent.read() == []
    for number in (0, 1):
        batches.commit(writer, batch(number))
    assert recent.read() == [*rows(0), *rows(1)]
    assert recent.read() == []
    batches.commit(writer, batch(2))
    assert recent.read() == rows(2)
    restarted = RecentResponses(TrajectoryStore(Log(run)), 1000)
    assert restarted.read() == [*rows(0), *rows(1), *rows(2)]


@pytest.mark.parametrize(("most", "kept"), [(1, [2]), (11, [1, 2]), (21, [0, 1, 2])])
def test_newest_batches_are_read_up_to_a_number_of_tokens(run: ObjectStore, most: int, kept: list[int]) -> None:
    """Each batch of this test has ten tokens."""
    batches, writer = ready(run, async_ratio=9)
    for number in range(3):
        batches.commit(writer, batch(number))
    recent = RecentResponses(TrajectoryStore(Log(run)), most)
    assert recent.read() == [row for number in kept for row in rows(number)]
    assert recent.read() == []


def test_unreadable_batch_is_left_out(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    batches, writer = ready(store, async_ratio=9)
    files = [batches.commit(writer, batch(number))[1] for number in range(3)]
    assert isinstance(files[1], Path)
    files[1].unlink()
    assert RecentResponses(TrajectoryStore(Log(store)), 1000).read() == [*rows(0), *rows(2)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(NO_TOKEN, 5), st.booleans()), min_size=1, max_size=8), max_size=6))
def test_prompt_ends_at_the_first_sampled_token(drawn: list[list[tuple[int, bool]]]) -> None:
    made = tuple(
        answer(sample, tuple(token for token, _ in one), tuple(own for _, own in one))
        for sample, one in enumerate(drawn)
    )
    found = list(list_responses(TrajectoryBatch.from_groups([TrajectoryGroup(GroupKey(0, 0), "p", "test", made)])))
    expected = []
    for one in drawn:
        tokens, mask = [token for token, _ in one], [own for _, own in one]
        if any(mask) and NO_TOKEN not in tokens:
            first = mask.index(True)
            expected.append((pack(*tokens[:first]), pack(*tokens[first:])))
    assert found == expected
