"""Tests of the figures (counters) of environments, which are summed over processes and supervisors."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.run_records.environment_figures import (
    EnvironmentUse,
    EnvironmentUses,
    read_environment_uses,
    store_environment_uses,
)

FIGURES = st.fixed_dictionaries({"resets": st.integers(0, 1000), "seconds": st.integers(0, 1000)})


@given(st.dictionaries(st.sampled_from("abc"), FIGURES), st.data())
def test_repeated_environment_measurements_are_not_added_up(
    newest: dict[str, dict[str, int]], data: st.DataObject
) -> None:
    """Old and new measurements arrive in any order, and from several supervisors."""
    uses = [EnvironmentUse(name, "trl", dict(one)) for name, one in newest.items()]
    older = [use._replace(figures={name: one // 2 for name, one in use.figures.items()}) for use in uses]
    first, second, store = EnvironmentUses(), EnvironmentUses(), MemoryStore("figures")
    first.note(data.draw(st.permutations([*uses, *older])))
    second.note(older)
    store_environment_uses(store, "one", first)
    store_environment_uses(store, "two", second)
    expected = {name: sum(one[name] for one in newest.values()) for name in ("resets", "seconds")}
    assert read_environment_uses(store).totals() == ({"trl": expected} if newest else {})


def test_figures_of_each_environment_kind_are_summed_separately() -> None:
    uses = EnvironmentUses()
    uses.note([EnvironmentUse("a", "trl", {"hangs": 1.0}), EnvironmentUse("b", "gymnasium", {"hangs": 2.0})])
    uses.note([EnvironmentUse("b", "trl", {"hangs": 3.0})])
    assert uses.totals() == {"gymnasium": {"hangs": 2.0}, "trl": {"hangs": 4.0}}


def test_run_without_environment_figures_stores_no_object() -> None:
    store = MemoryStore("figures")
    store_environment_uses(store, "one", EnvironmentUses())
    assert list(store.list("")) == []


def test_damaged_environment_figures_are_skipped() -> None:
    store = MemoryStore("figures")
    for number, damaged in enumerate(("", "[]", '{"one": {"trl": {"hangs": "many"}}}')):
        store.put(f"environments/{number}.json", damaged.encode())
    store.put("environments/good.json", json.dumps({"one": {"trl": {"hangs": 4}}}).encode())
    assert read_environment_uses(store).totals() == {"trl": {"hangs": 4.0}}
