"""Compares the retention rules (which versions are kept) with their definition, for all small values of the rules'
parameters.
"""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from rollflow.storage.log.retention import KINDS, Retention

LONG = 30  # number of versions in these tests
RULES = [Retention(*rules) for rules in product((1, 2, 3, 5), (1, 2, 3, 4, 7), (1, 2, 3, 5), (1, 3))]


def kept(rules: Retention, latest: int) -> set[int]:
    """Return the versions whose weights are kept: the newest `keep_last` versions, and every `keep_every`-th
    version.
    """
    newest = set(range(max(0, latest - rules.keep_last + 1), latest + 1))
    return newest | set(range(0, latest + 1, rules.keep_every))


def bases(rules: Retention, latest: int) -> set[int]:
    """Return the base of every kept version: the newest earlier version that stored the learner's state."""
    return {max(range(0, version, rules.state_every)) for version in kept(rules, latest) if version}


def with_parents(rules: Retention, versions: set[int]) -> set[int]:
    """Return the versions, and all earlier versions back to the newest full version, because deltas may need their
    weights.
    """
    return {v for last in versions for v in range(last - last % rules.full_every, last + 1)}


@pytest.mark.parametrize("rules", RULES)
def test_retention_keeps_versions_and_the_states_to_replay_them(rules: Retention) -> None:
    for latest in range(LONG):
        versions = range(latest + 1)
        states = bases(rules, latest) | {0, latest}
        assert {v for v in versions if rules.keeps(v, latest)} == kept(rules, latest)
        assert {v for v in versions if rules.is_needed("weights", v, latest)} == with_parents(
            rules, kept(rules, latest) | states
        )
        assert {v for v in versions if rules.is_needed("state", v, latest)} == states


@pytest.mark.parametrize("rules", RULES)
def test_learner_state_is_stored_with_every_kth_version(rules: Retention) -> None:
    assert [v for v in range(LONG) if rules.stores_state(v)] == list(range(0, LONG, rules.state_every))


@pytest.mark.parametrize("rules", RULES)
def test_object_is_deleted_within_a_window_or_kept_forever(rules: Retention) -> None:
    needed = [
        {(v, kind) for v in range(latest + 1) for kind in KINDS if rules.is_needed(kind, v, latest)}
        for latest in range(LONG)
    ]
    gone: set[tuple[int, str]] = set()
    for latest, (before, now) in enumerate(pairwise(needed), start=1):
        released = before - now
        assert not gone & now, "once not needed, never needed again"
        assert all(latest - version <= rules.window for version, _ in released)
        gone |= released


def test_default_retention_matches_a_hand_calculation() -> None:
    assert Retention() == Retention(keep_last=5, keep_every=10, state_every=1, full_every=1)
    assert [v for v in range(31) if Retention().is_needed("weights", v, 30)] == [
        0,
        9,
        10,
        19,
        20,
        25,
        26,
        27,
        28,
        29,
        30,
    ]
    assert [v for v in range(31) if Retention().is_needed("state", v, 30)] == [0, 9, 19, 25, 26, 27, 28, 29, 30]
