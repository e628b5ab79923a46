"""Tests of the stored run times of test cases, from which adaptive deadlines are computed: stored run times only rise,
and a damaged record counts as empty.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.run_records.case_anchors import CaseAnchors, anchors_path, read_anchors

SECONDS = st.floats(0, 1000)


@given(measured=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), SECONDS)))
def test_longest_time_of_a_correct_program_is_stored(measured: list[tuple[str, int, float]]) -> None:
    anchors = CaseAnchors()
    for row, case, seconds in measured:
        anchors.raise_row(row, {case: seconds})
    for row, case, _ in measured:
        longest = max(s for r, c, s in measured if (r, c) == (row, case))
        assert longest <= anchors.list_row(row)[case] <= longest + 0.0101
    assert anchors.list_row("c") == {}


def test_stored_test_case_times_are_read_back() -> None:
    run = MemoryStore("anchors")
    anchors = CaseAnchors({"a": {0: 1.5, 11: 0.01}}, 7, 2, 1)
    run.put(anchors_path("rewards.code"), anchors.encode())
    assert read_anchors(run, "rewards.code") == anchors
    assert read_anchors(run, "reward") == CaseAnchors()


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "[]",
        '{"rows": 3}',
        '{"rows": {"a": {"x": 1.0}}}',
        '{"rows": {"a": {"0": -1}}}',
        '{"rows": {"a": {"0": NaN}}}',
    ],
)
def test_damaged_record_of_test_case_times_counts_as_empty(damaged: str) -> None:
    run = MemoryStore("anchors")
    run.put(anchors_path("reward"), damaged.encode())
    assert read_anchors(run, "reward") == CaseAnchors()


@given(
    learned=st.lists(st.tuples(st.booleans(), st.sampled_from("ab"), st.integers(0, 3), SECONDS)),
    every=st.integers(1, 4),
)
def test_processes_that_exchange_test_case_times_agree(learned: list[tuple[bool, str, int, float]], every: int) -> None:
    one, other, known = CaseAnchors(), CaseAnchors(), CaseAnchors()

    def exchange() -> None:
        for giver, taker in ((one, other), (other, one)):
            news = giver.select_news(known)
            taker.merge_rows(news)
            known.merge_rows(news)

    for number, (first, row, case, seconds) in enumerate(learned):
        (one if first else other).raise_row(row, {case: seconds})
        if number % every == 0:
            exchange()
    exchange()
    assert one == other == known
    assert one.select_news(known) == {}
    for row, case in {(row, case) for _, row, case, _ in learned}:
        longest = max(s for _, r, c, s in learned if (r, c) == (row, case))
        # run times that are exchanged are not rounded up a second time
        assert longest <= one.list_row(row)[case] <= longest + 0.0101
