"""The index of running groups of responses, compared with a plain dictionary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollflow.storage.records import GroupKey
from rollflow.tasks.rollout.running_by_version import RunningByVersion

BOUNDS = (0.0, 0.5, 1.0, 2.0, 2.5, 4.0)


@dataclass(frozen=True)
class One:
    """Stands in for a running group of responses, with the attributes that the index uses."""

    prompt: int
    awaited: bool

    @property
    def key(self) -> GroupKey:
        return GroupKey(self.prompt, 0)


EVERY: list[Any] = [One(prompt, prompt % 3 > 0) for prompt in range(6)]
STEPS = st.lists(st.tuples(st.sampled_from(EVERY), st.sampled_from([None, 0, 1, 2, 3])), max_size=30)


@given(STEPS)
def test_running_groups_are_counted_by_start_version(steps: list[tuple[Any, int | None]]) -> None:
    starts, known = RunningByVersion(), dict[Any, int]()
    for one, version in steps:
        if version is None:
            starts.remove(one)
            known.pop(one, None)
        else:
            starts.add(version, one)
            known[one] = version
        check(starts, known)
        assert starts._running.keys() == starts._awaited.keys() == set(known.values())  # old versions are forgotten


def check(starts: RunningByVersion, known: dict[Any, int]) -> None:
    for bound in BOUNDS:
        old = [one for one, version in known.items() if version < bound]
        assert starts.count_before(bound) == len(old)
        assert set(starts.list_before(bound)) == set(old)
        assert starts.find_oldest_awaited(bound) == min((known[one] for one in old if one.awaited), default=None)
    for version in {version for one, version in known.items() if one.awaited}:
        assert starts.find_first_awaited(version) == min(
            one.key for one in known if one.awaited and known[one] == version
        )
