"""Tests that the outcomes of a prompt's dispatches agree with the run's state, and that versions are found by
bisection.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable

import pytest

from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.log.entries import BatchCommitted, VersionPublished, entry_path
from rollflow.storage.log.lineage import (
    AwaitingTraining,
    Consumed,
    Discarded,
    InFlight,
    Quarantined,
    find_version,
    list_fates,
)
from rollflow.storage.log.reading import AT_ONCE, iterate_written
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import DiscardReason, GroupKey
from tests.support.log_runs import Actors, committed, forget, published


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


def groups_of(store: MemoryStore, number: int) -> list[GroupKey]:
    body = committed(store, number).body
    assert isinstance(body, BatchCommitted)
    return [group.key for group in body.groups]


def test_list_fates_returns_each_outcome_of_a_prompt_attempt(store: MemoryStore) -> None:
    """One prompt's dispatches were preempted, in a voided batch, in flight and trained on. Another prompt's was
    filtered.
    """
    actors = Actors.begin(store).train(2)
    stale, gone = actors.scheduler.dispatch(2), actors.scheduler.dispatch(2)
    actors.scheduler.discard(0, DiscardReason.STALE)
    actors.scheduler.discard(0, DiscardReason.FILTERED)
    actors.ahead()
    again = GroupKey(stale.prompt, 1)
    assert again in groups_of(store, 2)
    log = Log(store)
    assert list_fates(log, stale.prompt) == {stale: list_fates(log, stale.prompt)[stale], again: AwaitingTraining(2)}
    actors.learner.log.follow()
    actors.learner.void(2)
    log.follow()
    assert list_fates(log, stale.prompt)[again] == Quarantined(2)
    third = GroupKey(stale.prompt, 2)
    assert list_fates(log, stale.prompt)[third] == InFlight(2)
    actors.scheduler.log.follow()
    actors.scheduler.begin()
    actors.train(1)
    assert third in groups_of(store, 2)
    log.follow()
    found = list_fates(log, stale.prompt)
    assert list(found) == [stale, again, third]
    assert [type(fate) for fate in found.values()] == [Discarded, Quarantined, Consumed]
    assert [str(fate) for fate in found.values()] == [
        "discarded as stale when batch 2 was formed; started under version 2; 5 response tokens",
        "in batch 2, which was quarantined; the prompt was issued again",
        "trained into version 3",
    ]
    [fate] = list_fates(log, gone.prompt).values()
    assert isinstance(fate, Discarded)
    assert (fate.batch, fate.discard.reason) == (2, DiscardReason.FILTERED)
    assert list_fates(log, 10_000) == {}


def test_prompt_attempt_in_flight_names_the_newest_batch(store: MemoryStore) -> None:
    """Batch 0 is damaged and formed last, while two newer batches wait."""
    actors = Actors.begin(store)
    actors.ahead(3)
    actors.learner.log.follow()
    actors.learner.void(0)
    actors.scheduler.log.follow()
    actors.scheduler.begin()
    *_, left = (actors.scheduler.dispatch(0) for _ in range(3))  # two of the three groups form the batch
    actors.ahead()
    log = Log(store)
    assert (log.state.holes, log.state.next_batch, log.state.in_flight) == ([], 3, (left,))
    assert list_fates(log, left.prompt) == {left: InFlight(2)}


def test_listed_prompt_outcomes_agree_with_the_counters(store: MemoryStore) -> None:
    actors = Actors.begin(store)
    actors.ahead(2)
    for turn in range(6):
        for _ in range(2):
            actors.scheduler.dispatch(turn)
        actors.scheduler.discard(
            turn % 2, [DiscardReason.STALE, DiscardReason.FILTERED, DiscardReason.FAILED][turn % 3]
        )
        actors.train(1)
    log = Log(store)
    state = log.state
    found = [list_fates(log, prompt) for prompt in range(max(state.cursor.upcoming)) if state.cursor.covers(prompt)]
    kinds = Counter(type(fate) for one in found for fate in one.values())
    open_ones = {key for one in found for key, fate in one.items() if isinstance(fate, InFlight)}
    assert open_ones == set(state.in_flight)
    assert kinds[Consumed] == state.totals.groups["trained"] == 12
    assert kinds[AwaitingTraining] == sum(len(batch.groups) for batch in state.waiting.values()) == 4
    assert kinds[Discarded] == state.totals.groups.total() - 12 == 6
    assert all(list(one) == sorted(one) for one in found)


# --- versions --------------------------------------------------------------------------------------------------


class Watched(MemoryStore):
    """A store that calls `before` with the path of every read."""

    before: Callable[[str], object] = staticmethod(lambda path: None)

    def get(self, path: str) -> bytes:
        type(self).before(path)
        return super().get(path)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    paths: list[str] = []
    monkeypatch.setattr(Watched, "before", staticmethod(paths.append))
    return paths


@pytest.mark.parametrize("first", [0, 1, AT_ONCE])
def test_reading_a_range_of_the_log_yields_all_its_entries(store: MemoryStore, first: int) -> None:
    log = Actors.begin(store).train(40).learner.log
    for last in (first, first + AT_ONCE - 1, first + AT_ONCE, log.state.n):
        assert [one.entry.n for one in iterate_written(log, first, last)] == list(range(first, last + 1))


@pytest.mark.parametrize("reason", [DiscardReason.FILTERED, DiscardReason.STALE])
def test_outcome_search_stops_at_the_last_outcome_of_a_prompt(
    store: MemoryStore, read: list[str], reason: DiscardReason
) -> None:
    """After a prompt was filtered, or was trained on at its second attempt, no other outcome can follow."""
    actors = Actors.begin(store)
    key = actors.scheduler.dispatch(0)
    actors.scheduler.discard(0, reason)
    actors.train(40)
    log = Log(Watched(store.name))
    read.clear()
    last = list(list_fates(log, key.prompt).values())[-1]
    assert isinstance(last, Discarded if reason is DiscardReason.FILTERED else Consumed)
    assert 0 < len(read) <= AT_ONCE < log.state.n // 2


@pytest.mark.parametrize("prune", [True, False])
def test_find_version_finds_every_version(store: MemoryStore, prune: bool) -> None:
    actors = Actors.begin(store)
    actors.ahead(2)
    actors.train(20, prune=prune)
    log = Log(store)
    for version in range(21):
        assert find_version(log, version).entry == published(store, version)
    for version in (-1, 21):
        with pytest.raises(Missing, match=f"has no version {version}; its newest version is 20"):
            find_version(log, version)


def test_find_version_needs_logarithmic_reads(store: MemoryStore, read: list[str]) -> None:
    Actors.begin(store).train(40)
    log = Log(Watched(store.name))
    bits = log.state.n.bit_length()
    for version in range(41):
        read.clear()
        body = find_version(log, version).entry.body
        assert isinstance(body, VersionPublished)
        assert body.number == version
        assert len(read) <= (1 if version == 40 or version in log.state.held else bits + 1)
        assert all(path.startswith("log/") for path in read)


def test_find_version_raises_if_a_log_entry_is_lost(store: MemoryStore) -> None:
    Actors.begin(store).train(9)
    log = Log(store)
    forget(store)
    n = published(store, 2).n
    store.delete(entry_path(n))
    with pytest.raises(Corrupt, match=f"{n:010d}.json is missing"):
        find_version(log, 2)
