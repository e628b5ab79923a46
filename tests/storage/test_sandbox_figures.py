"""Tests of the figures (counters) of sandboxes: sums over processes and supervisors, and run times of programs."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.run_records.sandbox_figures import (
    BUCKETS,
    GROWTH,
    SandboxFigures,
    SandboxUse,
    SandboxUses,
    find_bucket,
    list_figures,
    read_sandbox_uses,
    store_sandbox_uses,
)

SECONDS = st.floats(0.001, 3600.0)
COUNTS = st.integers(0, 1000)
FIGURES = st.builds(
    SandboxFigures,
    started=COUNTS,
    renewed=COUNTS,
    replaced=st.dictionaries(st.sampled_from(["timeout", "failed"]), st.integers(1, 9)),
    ends=st.dictionaries(st.sampled_from(["exited", "memory"]), st.integers(1, 9)),
    failures=COUNTS,
    times=st.dictionaries(st.integers(0, BUCKETS - 1), st.integers(1, 9)),
    in_use=COUNTS,
)


@given(st.lists(SECONDS, min_size=1), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_quantile_of_sandbox_times_is_exact_to_five_percent(seconds: list[float], share: float) -> None:
    times = SandboxFigures()
    for one in seconds:
        times += SandboxFigures(times={find_bucket(one): 1})
    exact = sorted(seconds)[max(0, math.ceil(share * len(seconds)) - 1)]
    assert times.find_quantile(share) == pytest.approx(exact, rel=math.sqrt(GROWTH) - 1 + 1e-9)


def test_times_outside_all_buckets_count_in_the_nearest_bucket() -> None:
    assert (find_bucket(0.0), find_bucket(-1.0), find_bucket(1e9)) == (0, 0, BUCKETS - 1)
    assert SandboxFigures().find_quantile(0.5) is None


@given(st.dictionaries(st.sampled_from("abc"), FIGURES), st.data())
def test_repeated_sandbox_measurements_are_not_added_up(newest: dict[str, SandboxFigures], data: st.DataObject) -> None:
    """Old and new measurements arrive in any order, and from several supervisors."""
    uses = [SandboxUse(name, "rock", one) for name, one in newest.items()]
    older = [use._replace(figures=replace(use.figures, started=use.figures.started // 2)) for use in uses]
    first, second, store = SandboxUses(), SandboxUses(), MemoryStore("figures")
    first.note(data.draw(st.permutations([*uses, *older])))
    second.note(older)
    store_sandbox_uses(store, "one", first)
    store_sandbox_uses(store, "two", second)
    expected = sum((replace(one, in_use=0) for one in newest.values()), SandboxFigures())
    assert read_sandbox_uses(store).totals() == ({"rock": expected} if newest else {})


def test_ended_process_counts_as_using_no_sandbox() -> None:
    uses = SandboxUses()
    first = SandboxUse("one", "rock", SandboxFigures(3, in_use=2))
    uses.note_all([first, SandboxUse("two", "rock", SandboxFigures(1))])
    assert uses.totals()["rock"].in_use == 2
    uses.note_all([SandboxUse("two", "rock", SandboxFigures(2, in_use=1))])
    assert uses.totals() == {"rock": SandboxFigures(5, in_use=1)}


def test_run_without_sandboxes_stores_no_sandbox_counts() -> None:
    store = MemoryStore("figures")
    store_sandbox_uses(store, "one", SandboxUses())
    assert list(store.list("")) == []


def test_damaged_sandbox_figures_are_skipped() -> None:
    store = MemoryStore("figures")
    for number, damaged in enumerate(("", "[]", '{"one": {"rock": {"started": "many"}}}')):
        store.put(f"sandboxes/{number}.json", damaged.encode())
    store.put("sandboxes/good.json", json.dumps({"one": {"rock": {"started": 4}}}).encode())
    assert read_sandbox_uses(store).totals() == {"rock": SandboxFigures(4)}


def test_unknown_time_bucket_counts_as_the_longest_time() -> None:
    """A damaged object may contain any bucket number."""
    assert SandboxFigures(times={10**6: 1}).find_quantile(0.5) == pytest.approx(GROWTH ** (BUCKETS - 1.5) / 1000)


def test_sandbox_figures_are_listed_with_kills_and_reasons() -> None:
    figures = SandboxFigures(2, 1, {"not emptied": 1}, {"exited": 2, "memory": 1, "stopped": 1}, 1, 0.5, {0: 4}, 1)
    listed = list_figures(figures)
    assert listed["programs"] == 4.0
    assert listed["killed_memory"] == listed["replaced_not_emptied"] == listed["replaced"] == 1.0
    assert listed["median_seconds"] == listed["p99_seconds"] == 0.001
    assert "killed_stopped" not in listed
