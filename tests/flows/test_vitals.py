"""Tests that an actor that does not answer is called busy while its process computes, and stuck once the process is
idle.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rollflow.flows.keepalive import vitals as module
from rollflow.flows.keepalive.vitals import START_SECONDS, Vitals
from rollflow.flows.ray_cluster.actor_process import ActorProcess
from rollflow.storage.errors import Unreachable


class World:
    """A clock, and an actor whose process uses a share of a CPU that the test sets."""

    def __init__(self) -> None:
        self.now, self.used, self.share, self.lost = 0.0, 0.0, 0.0, ""
        self.state, self.gone = "ALIVE", False

    def find_actor_process(self, _: Any) -> Any:
        world = self

        class Process(ActorProcess):
            def cpu_seconds(self) -> float | None:
                return None if world.gone else world.used

        return Process(self.state, 7, "node", "LearnerActor")

    def starting(self, vitals: Vitals, seconds: float) -> set[bool]:
        """Return what each check reports while so many seconds pass."""
        until, said = self.now + seconds, set[bool]()
        while self.now < until:
            self.now, self.used = self.now + 0.5, self.used + 0.5 * self.share
            said.add(vitals.check_actor())
        return said


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made.now))
    monkeypatch.setattr(module, "find_actor_process", made.find_actor_process)
    monkeypatch.setattr(module, "explain_lost_actor", lambda _: made.lost)
    return made


@pytest.fixture
def vitals(world: World) -> Vitals:
    return Vitals("learner", SimpleNamespace(_actor_id=None), 30.0)


def test_busy_actor_that_does_not_answer_is_not_dead(world: World, vitals: Vitals) -> None:
    """An actor that shares the machine with thirty other processes computes slowly, but is not dead."""
    world.share = 0.03
    assert world.starting(vitals, 3600.0) == {False}


def test_starting_actor_that_is_idle_counts_as_stuck(world: World, vitals: Vitals) -> None:
    world.share, world.used = 0.005, 100.0  # idle threads use this share of a CPU; the process had worked before
    with pytest.raises(Unreachable, match="the process of learner hangs: it uses no CPU time"):
        world.starting(vitals, 3600.0)
    assert 30.0 <= world.now <= 35.0


def test_answer_of_an_actor_resets_its_silent_time(world: World, vitals: Vitals) -> None:
    for _ in range(10):
        assert world.starting(vitals, 25.0) == {False}
        vitals.note_answer()


def test_starting_actor_without_a_process_counts_as_stuck(world: World, vitals: Vitals) -> None:
    world.share, world.gone = 1.0, True
    with pytest.raises(Unreachable, match="it uses no CPU time"):
        world.starting(vitals, 3600.0)


def test_actor_creation_may_take_start_seconds_but_not_more(world: World, vitals: Vitals) -> None:
    """The actor's imports are slow, because four other actors also import modules on the two cores."""
    world.state = "PENDING_CREATION"
    assert world.starting(vitals, START_SECONDS) == {True}
    with pytest.raises(Unreachable, match=f"the process of learner did not start within {START_SECONDS:g} s"):
        world.starting(vitals, 10.0)


def test_error_names_an_actor_whose_ray_worker_died(world: World, vitals: Vitals) -> None:
    world.state = "PENDING_CREATION"
    assert world.starting(vitals, 10.0) == {True}
    world.lost = "a Ray worker (process 12) died before Ray registered it: no memory"
    with pytest.raises(Unreachable, match=r"cannot wait any longer for learner: a Ray worker \(process 12\) died"):
        world.starting(vitals, 1.0)
