"""Tests that the restart of a stage, or of the channel, does not delay the supervision and the restarts of the other
stages.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.states import Failed

from rollflow.flows.keepalive import stages as stages_module
from rollflow.flows.keepalive.restarts import RestartBudget, Restarts, RestartsExhausted
from rollflow.flows.keepalive.stages import ACTORS, Stages
from rollflow.flows.ray_cluster import cluster
from rollflow.storage.errors import EngineFailed
from rollflow.storage.objects import open_store
from rollflow.tasks.actors.channel import CHANNEL
from rollflow.tasks.actors.lease import Lease
from rollflow.tasks.actors.reward import REWARD
from rollflow.tasks.actors.statuses import RewardStatus
from rollflow.tasks.run.config import RecoveryConfig, RunConfig
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.runtime.actor_warnings import ActorWarning
from tests.support.described import describe
from tests.support.log_actors import Supervisor

STATES: Mapping[str, Any] = {
    name: SimpleNamespace(
        name=name,
        message="killed",
        is_crashed=lambda name=name: name == "Crashed",
        is_final=lambda name=name: name in ("Crashed", "Completed"),
        is_running=lambda name=name: name == "Running",
        is_completed=lambda name=name: name == "Completed",
        is_paused=lambda name=name: name == "Paused",
    )
    for name in ("Running", "Crashed", "Completed", "Paused")
}


class World:
    """A made-up Prefect server and Ray cluster, on a clock that a test advances. The starts of roles and the messages
    are recorded.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, context: RunContext) -> None:
        self.now = 1000.0
        self.started: list[tuple[str, float]] = []
        self.dead: set[str] = set()  # roles that die as soon as they run
        self.over: set[str] = set()  # roles that have completed
        self.pause: set[str] = set()  # roles that a user pauses, once
        self.told: list[str] = []
        self.warned: list[ActorWarning] = []
        self.states: list[tuple[str, str]] = []  # the states that flow runs were set to, by role
        self.runs: dict[uuid.UUID, str] = {}
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(stages_module, "time", clock)
        monkeypatch.setattr(stages_module, "open_client", self.api)
        monkeypatch.setattr(stages_module, "start", self.start)
        monkeypatch.setattr(stages_module, "states_of", self.states_of)
        monkeypatch.setattr(stages_module, "unfinished_runs", lambda *_: [])
        monkeypatch.setattr(stages_module, "start_channel", lambda *_: self.started.append((CHANNEL, self.now)))
        monkeypatch.setattr(stages_module, "begin_actors", lambda *_: [])
        monkeypatch.setattr(cluster, "kill_named", lambda *_: [])
        monkeypatch.setattr(cluster, "find_actor", self.actor)
        monkeypatch.setattr(cluster, "has_ended", lambda *_: True)
        monkeypatch.setattr(cluster, "call_within", self.call)
        self.stages = Stages(context, "a:1", self.told.append, self.warned.extend)
        limits = RecoveryConfig(restarts=100, backoff_seconds=40.0)
        self.stages.restarts = Restarts(RestartBudget(limits, lambda: self.now), lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    @contextmanager
    def api(self) -> Iterator[Any]:
        yield self

    def set_flow_run_state(self, run: uuid.UUID, state: Any, force: bool = False) -> None:
        self.states.append((self.runs[run], state.name))

    def read_flow_run(self, run: uuid.UUID) -> Any:
        return SimpleNamespace(state=STATES[self.state(self.runs[run])])

    def start(self, client: object, role: str, *_: object, **__: object) -> uuid.UUID:
        run = uuid.uuid4()
        self.runs[run] = role
        self.started.append((role, self.now))
        return run

    def states_of(self, client: object, runs: list[uuid.UUID]) -> dict[uuid.UUID, Any]:
        return {run: STATES[self.state(self.runs[run])] for run in runs}

    def state(self, role: str) -> str:
        if role in self.pause:
            self.pause.remove(role)
            return "Paused"
        if role in self.over:
            return "Completed"
        return "Crashed" if role in self.dead else "Running"

    def actor(self, name: str) -> Any:
        def ask(*_: object) -> str:
            return name

        return SimpleNamespace(ping=SimpleNamespace(remote=ask), status=SimpleNamespace(remote=ask))

    def call(self, asked: str, *_: object) -> Any:
        if asked != CHANNEL or CHANNEL in self.dead:
            raise EngineFailed("its process is gone")

    def look_for(self, seconds: float) -> None:
        """Run the supervisor's loop."""
        until = self.now + seconds
        while self.now < until:
            self.stages.look()
            self.now += 0.5

    def starts_of(self, role: str) -> list[float]:
        return [at for name, at in self.started if name == role]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    describe(open_store(str(tmp_path)), "run", RunConfig())
    found = World(monkeypatch, RunContext(str(tmp_path), tmp_path / "cache"))
    found.stages.start()
    found.look_for(5.0)
    return found


def test_each_stage_is_started_once(world: World) -> None:
    assert sorted(role for role, _ in world.started) == sorted([CHANNEL, *ACTORS])


@pytest.mark.parametrize("hangs", [False, True])
def test_remaining_stages_are_ended_after_the_last_version(
    world: World, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """The next supervisor finds that every version is trained. The reward stage, which waits for work, and all actors
    are still running.
    """
    started, killed = list(world.started), list[str]()
    stages = Stages(world.stages.context, "a:1", world.told.append)
    left = [
        SimpleNamespace(id=run, state_type=None, parameters={"run": stages.context.uri}, tags=stages._tags(role))
        for run, role in world.runs.items()
        if role == "reward"
    ]
    monkeypatch.setattr(stages_module, "unfinished_runs", lambda *_: left)
    monkeypatch.setattr(cluster, "kill_named", killed.extend)
    monkeypatch.setattr(stages, "_finish_reward", lambda: None if hangs else world.over.add("reward"))
    stages.clear()
    assert {*ACTORS.values(), CHANNEL, "engine-0"} <= set(killed)
    assert world.started == started
    assert world.states == ([("reward", "Cancelling")] if hangs else [])
    expected = dict.fromkeys(ACTORS, "Completed") | ({"reward": "Cancelled"} if hangs else {})
    assert {role: status.state for role, status in stages.statuses().items()} == expected


@pytest.mark.parametrize(("waiting", "other"), permutations([*ACTORS, CHANNEL], 2))
def test_stage_that_waits_does_not_delay_other_stages(world: World, waiting: str, other: str) -> None:
    """The first stage dies repeatedly and has to wait 40 seconds; then another stage dies for the first time."""
    world.dead = {waiting}
    world.look_for(5.0)
    assert len(world.starts_of(waiting)) == 2  # the restarted stage died, too
    died = world.now
    world.dead |= {other}
    world.look_for(3.0)
    again = world.starts_of(other)[1]
    assert again - died <= 2.0
    assert len(world.starts_of(waiting)) == 2


@pytest.mark.parametrize("role", [*ACTORS, CHANNEL])
def test_stage_restart_begins_only_after_its_pause(world: World, role: str) -> None:
    world.dead = {role}
    world.look_for(5.0)
    second = world.starts_of(role)[1]
    world.dead = set()
    world.look_for(60.0)
    [third] = world.starts_of(role)[2:]
    assert 40.0 <= third - second <= 44.0
    world.look_for(60.0)
    assert len(world.starts_of(role)) == 3


@pytest.mark.parametrize("role", ACTORS)
def test_stage_whose_flow_run_was_paused_is_restarted(world: World, role: str) -> None:
    """Prefect leaves the process of a paused flow run alone; the process ends once the flow run is set to running and
    then cancelled.
    """
    world.pause = {role}
    world.look_for(5.0)
    assert world.states == [(role, "Running"), (role, "Cancelling")]
    assert len(world.starts_of(role)) == 2
    assert f"the {role} stage was paused and continues; to pause the run, pause the run's own flow run" in world.told


@pytest.mark.parametrize("attended", [True, False])
def test_stage_whose_flow_never_reaches_its_actor_is_restarted(
    world: World, attended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage whose flow hangs before it reaches its actor is restarted."""
    asked = {REWARD: RewardStatus(attended=attended), CHANNEL: None}
    monkeypatch.setattr(cluster, "call_within", lambda asked_of, *_: asked.get(asked_of, RewardStatus()))
    world.look_for(stages_module.UNATTENDED_SECONDS + 30.0)
    assert [len(world.starts_of(role)) for role in ACTORS] == [
        1 + (role == "reward" and not attended) for role in ACTORS
    ]


def test_supervisor_that_was_blocked_reports_lost_actors(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor wakes after its lease has expired: its stages have failed, and the run ends with their error
    instead of a restart.
    """
    lease = Lease.of(world.stages.context)
    failed = Failed(message=f"Flow run encountered an exception: SupervisorGone: {lease.sentence}")
    monkeypatch.setattr(stages_module, "states_of", lambda _, runs: dict.fromkeys(runs, failed))
    world.now += 2 * lease.seconds
    with pytest.raises(
        RestartsExhausted,
        match=rf"the rollout stage ended as Failed: .*{re.escape(lease.sentence)}$",
    ):
        world.stages.look()
    assert len(world.started) == 4  # by the fixture


def test_supervisor_collects_the_warnings_of_actors(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = ActorWarning(REWARD, "a:1", 1, "odd")
    asked = {REWARD: RewardStatus(warned=[odd]), CHANNEL: None}
    monkeypatch.setattr(cluster, "call_within", lambda asked_of, *_: asked.get(asked_of, RewardStatus()))
    world.stages.start()
    world.look_for(5)
    assert set(world.warned) == {odd}


def test_supervisor_notices_that_its_flow_run_is_paused(world: World) -> None:
    own = uuid.uuid4()
    world.stages._own = [own]
    world.runs[own] = "supervisor"
    world.pause.add("supervisor")
    for paused in (True, False):
        world.stages.look_at_own()
        assert world.stages.paused == paused
    assert len(world.started) == 4  # by the fixture


@pytest.mark.parametrize("claimed", [False, True], ids=["no role since", "a role since"])
def test_stages_of_an_older_config_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claimed: bool) -> None:
    """After a config change, a run first ends the old flow runs and actors. It ends nothing if a stage has already
    started with the new config.
    """
    store = open_store(str(tmp_path))
    describe(store, "run", RunConfig())
    supervisor = Supervisor(store)
    supervisor.change(versions=7)
    if claimed:
        supervisor.log.claim("learner")
    world = World(monkeypatch, RunContext(str(tmp_path), tmp_path / "cache"))
    older = {uuid.uuid4(): role for role in ACTORS}
    world.runs |= older

    def under_way(*_: object) -> list[Any]:
        uri, there = world.stages.context.uri, [run for run in older if older[run] not in world.over]
        tags = {run: world.stages._tags(older[run]) for run in there}
        return [SimpleNamespace(id=run, state_type="RUNNING", parameters={"run": uri}, tags=tags[run]) for run in there]

    def cancelled(run: uuid.UUID, state: Any, force: bool = False) -> None:
        world.over.add(older[run])

    monkeypatch.setattr(stages_module, "unfinished_runs", under_way)
    monkeypatch.setattr(world, "set_flow_run_state", cancelled)
    monkeypatch.setattr(cluster, "kill_named", lambda names: world.started.append(("killed", len([*names]))))
    world.stages.start()
    assert world.over == (set() if claimed else {*ACTORS})
    names = [name for name, _ in world.started]
    assert names == ([CHANNEL] if claimed else ["killed", CHANNEL, *ACTORS])
