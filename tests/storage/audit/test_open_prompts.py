"""Tests that an audit lists prompts that are in flight for too long, but does not report them as violations."""

from __future__ import annotations

import pytest

from rollflow.storage.audit import expecting
from rollflow.storage.audit.audit import audit
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import Discard, DiscardReason
from tests.support.log_runs import Actors


def hold_back(store: MemoryStore, alpha: float, batches: int) -> Actors:
    """Create a run whose first prompt is still in flight after `batches` batches."""
    actors = Actors.begin(store, alpha)
    actors.scheduler.log.follow()
    actors.scheduler.dispatch(0)
    actors.scheduler.running.clear()
    return actors.train(batches)


@pytest.mark.parametrize("alpha", [0.0, 1.5, 2.0])
def test_audit_lists_a_prompt_that_was_never_finished(store: MemoryStore, alpha: float) -> None:
    explained = expecting.LONG * (int(alpha) + 1)
    actors = hold_back(store, alpha, explained + 1)
    assert audit(store, deep=True).overdue == []
    actors.train()
    line = f"prompt 0 has been in flight since batch 1; the next batch is {explained + 2}"
    for deep in (True, False):
        report = audit(store, deep=deep)
        assert (report.overdue, report.violations) == ([line], [])


def test_audit_does_not_list_a_finished_prompt(store: MemoryStore) -> None:
    """At the end of the run the first dispatch is discarded as stale, so it is not listed."""
    actors = hold_back(store, 0.0, 9)
    assert audit(store, deep=True).overdue != []
    actors.scheduler.log.follow()
    [key] = [key for key in actors.scheduler.log.state.in_flight if key.prompt == 0]
    actors.scheduler.discards.append(Discard(key, DiscardReason.STALE, 0, 5))
    actors.train()
    assert audit(store, deep=True).overdue == []
    assert audit(store).overdue == []
