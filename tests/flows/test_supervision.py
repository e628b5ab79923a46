"""A stage that makes no progress is named; one that waits for another by design is not blamed."""

from __future__ import annotations

from typing import Any

import pytest

from rollflow.flows import cluster, supervision
from rollflow.flows.supervision import StageFailed, watch


class Actor:
    """A call that ends after `polls` looks, and the statuses seen meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, polls: int, statuses: list[dict[str, Any]]) -> None:
        self.polls, self.statuses, self.now = polls, statuses, 0.0
        monkeypatch.setattr(cluster, "done", self.done)
        monkeypatch.setattr(cluster, "call", lambda value, *_: value)
        monkeypatch.setattr(supervision.time, "monotonic", lambda: self.now)

    def done(self, reference: Any, seconds: float) -> bool:
        self.now += seconds
        self.polls -= 1
        return self.polls < 0

    def status(self) -> dict[str, Any]:
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]

    def watch(self) -> Any:
        return watch("result", self.status, 5.0, lambda _: None, "the learner")


def test_progress_is_what_keeps_a_stage_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = [{"version": v // 4, "idle": 0.1 * v} for v in range(50)]
    assert Actor(monkeypatch, 50, statuses).watch() == "result"


def test_a_stuck_stage_is_named_with_what_was_last_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = [{"version": 3, "idle": 0.1 * v, "seconds": v} for v in range(50)]  # only clocks go on
    with pytest.raises(StageFailed, match=r"the learner made no progress for 5 s; last seen: \{'version': 3\}"):
        Actor(monkeypatch, 50, statuses).watch()


def test_waiting_for_another_stage_is_not_being_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Actor(monkeypatch, 50, [{"version": -1, "waits_for": "the first policy version"}]).watch() == "result"
