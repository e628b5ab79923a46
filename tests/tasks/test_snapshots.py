"""Tests snapshots of environments: after a crash, an episode continues from its newest snapshot, as if nothing had
happened.

Each run is a whole pipeline on a virtual clock, and has several lives. A life ends by a crash at a random time, and the
next life continues from storage.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.audit.audit import audit
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import GroupKey, StopReason
from rollflow.storage.run_records.episode_restarts import read_restarts
from rollflow.storage.run_records.finished_turns import EnvironmentSnapshot, EpisodeEvent, FinishedTurn, TurnKey
from rollflow.storage.token_arrays import Float32s, Int32s
from rollflow.tasks.environments.base import Environment, Episode, SnapshotRejected
from rollflow.tasks.rollout.config import DurableTurns
from rollflow.tasks.rollout.resuming.journal import OTHER_REQUEST
from rollflow.tasks.rollout.resuming.restore_point import find_restore_point
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import Score
from tests.support.pipeline import Pipeline
from tests.tasks.test_scheduler import trained

TURNS = 5
VERSIONS = 3


@dataclass
class Journey(Environment):
    """An environment whose world is outside of the run. The state of the world depends on all actions, and each action
    must have exactly one effect.

    `lives` contains, for each life of the run, the turns on which each episode acted.
    """

    offers: bool = True  # whether it stores snapshots
    rejects: bool = False  # whether it rejects its snapshots
    replays: bool = True  # whether it can repeat its actions
    forgetful: bool = False  # whether it does not look up whether an action was done
    salt: int = 0  # a different number gives different observations
    padding: int = 0  # number of further bytes of a snapshot
    effects: Counter[str] = field(default_factory=Counter)
    lives: list[dict[str, list[int]]] = field(default_factory=lambda: [{}])

    async def play(self, episode: Episode) -> Score | None:
        state = self.begin(episode)
        while (made := await episode.generate(max_tokens=3)) is not None:
            turn = self.act(episode)
            await asyncio.sleep(0.05)
            state = (state * 31 + sum(made.tokens) + self.salt) % 9973
            episode.reward(state % 5 / 4)
            if turn == TURNS - 1:
                return Score(float(state % 2))
            episode.enter_state(str(state))
            if state % 4 == 1:
                episode.take_role(("guide", "guest")[state % 8 // 5])
            if state % 3 == 0:
                episode.start_branch((1, state % 50))
            else:
                episode.add((state % 50, 1))
            if self.offers:
                episode.save_snapshot(state.to_bytes(4, "big") + bytes(self.padding))
            await asyncio.sleep(0.02)
        return None

    def begin(self, episode: Episode) -> int:
        if episode.snapshot is not None:
            if self.rejects:
                raise SnapshotRejected("the world has changed")
            return int.from_bytes(episode.snapshot[:4], "big")
        if not self.replays:
            episode.forget_turns("the actions cannot be repeated")
        assert not len(episode.response)
        episode.replace_prompt((*episode.prompt.tokens, 9))
        return episode.seed % 97

    def act(self, episode: Episode) -> int:
        """Do the action of the newest turn, unless the action was already done before a crash."""
        name, turn = episode.turn_id.rsplit(".", 1)
        if self.forgetful or not (episode.is_recalled and self.effects[episode.turn_id]):
            self.effects[episode.turn_id] += 1
        self.lives[-1].setdefault(name, []).append(int(turn))
        return int(turn)


def live(
    environment: Journey, lives: Sequence[float] = (), durable: DurableTurns = "before-action", **keys: Any
) -> MemoryStore:
    """Run a synchronous run to its end; each of `lives` is the time in seconds after which the run dies."""
    store = MemoryStore(uuid.uuid4().hex)

    async def ends(seconds: float | None) -> bool:
        pipeline = Pipeline(
            store, versions=VERSIONS, async_ratio=0.0, environment=environment, durable_turns=durable, **keys
        )
        try:
            async with asyncio.timeout(seconds):
                await pipeline.run()
        except TimeoutError:
            environment.lives.append({})
            return False
        return True

    assert any(run_virtual(ends(seconds)) for seconds in (*lives, None))
    assert audit(store).clean
    assert not list(store.list("turns"))
    return store


def list_rows(store: MemoryStore) -> list[Any]:
    """Return the trajectories on which each version was trained, without their times."""
    return [
        (version, group.key, replace(one, generation_seconds=0.0, reward_seconds=0.0))
        for version, batch in trained(store)
        for group in sorted(batch.groups(), key=lambda group: group.key)
        for one in sorted(group.trajectories, key=lambda one: one.sample)
    ]


@cache
def list_quiet() -> list[Any]:
    """Return the trained trajectories of a run that was not killed."""
    return list_rows(live(Journey(offers=False)))


LIVES = st.lists(st.floats(0.05, 3.0), min_size=1, max_size=4)


@settings(max_examples=15, deadline=None)
@given(LIVES)
def test_killed_episodes_continue_from_their_snapshots(lives: list[float]) -> None:
    """No action is done twice. After a crash, an episode repeats at most the lookup of its newest action."""
    environment = Journey()
    store = live(environment, lives)
    assert list_rows(store) == list_quiet()
    assert set(environment.effects.values()) == {1}
    for before, after in zip(environment.lives, environment.lives[1:], strict=False):
        for name, turns in after.items():
            assert turns == list(range(turns[0], turns[-1] + 1))
            assert turns[0] >= before.get(name, [0])[-1]
    assert not read_restarts(store)


@settings(max_examples=15, deadline=None)
@given(LIVES, st.sampled_from(["background", "before-action", "off"]), st.booleans())
def test_run_after_crashes_equals_the_run_without_crashes(
    lives: list[float], durable: DurableTurns, offers: bool
) -> None:
    assert list_rows(live(Journey(offers), lives, durable)) == list_quiet()


def test_rejected_snapshot_is_replayed_with_its_reason() -> None:
    environment = Journey(rejects=True)
    store = live(environment, [0.4])
    assert list_rows(store) == list_quiet()
    assert set(environment.effects.values()) == {1}
    restarts = read_restarts(store)
    assert {one.reason for one in restarts} == {"the snapshot was rejected: the world has changed"}
    assert {one.turn for one in restarts} == {0}
    assert {turns[0] for turns in environment.lives[-1].values()} == {0}


def test_environment_without_replay_begins_anew_and_says_why() -> None:
    environment = Journey(offers=False, replays=False)
    store = live(environment, [0.4])
    assert list_rows(store) == list_quiet()  # the policy samples the same with the same seeds
    assert {one.reason for one in read_restarts(store)} == {"the actions cannot be repeated"}


def test_changed_observation_after_a_crash_is_recorded() -> None:
    environment = Journey(offers=False, forgetful=True)
    store = MemoryStore(uuid.uuid4().hex)

    async def run(seconds: float | None) -> None:
        pipeline = Pipeline(store, versions=1, async_ratio=0.0, environment=environment, durable_turns="before-action")
        async with asyncio.timeout(seconds):
            await pipeline.run()

    with pytest.raises(TimeoutError):
        run_virtual(run(0.4))
    environment.salt = 5
    run_virtual(run(None))
    restarts = read_restarts(store)
    assert {(one.turn, one.reason) for one in restarts} == {(1, OTHER_REQUEST)}
    assert audit(store).clean


def test_too_large_snapshot_is_not_stored(caplog: pytest.LogCaptureFixture) -> None:
    environment = Journey(padding=100)
    with caplog.at_level(logging.WARNING):
        store = live(environment, [0.4], max_snapshot_bytes=50)
    assert list_rows(store) == list_quiet()
    assert {turns[0] for turns in environment.lives[-1].values()} == {0}
    said = [record.getMessage() for record in caplog.records if "max_snapshot_bytes" in record.getMessage()]
    assert len(said) == 2  # one in each life
    assert "a snapshot of 104 bytes is larger than rollout.max_snapshot_bytes = 50 and is not stored" in said[0]


# --- the point from which an episode continues ------------------------------------------------------------------------


def build_history(turns: int) -> tuple[list[FinishedTurn], list[EnvironmentSnapshot]]:
    """Return the turns of an episode, and a snapshot after each of them."""
    stored, snapshots, parent = list[FinishedTurn](), list[EnvironmentSnapshot](), ""
    for number in range(turns):
        key = TurnKey(GroupKey(3, 1), 2, number)
        tokens, logprobs, versions = Int32s.of((number, 7)), Float32s.of((-1.0, -2.0)), Int32s.of((1, 1))
        stored.append(FinishedTurn(key, "request", 1, StopReason.STOP, tokens, logprobs, versions))
        events = (EpisodeEvent("turn", stored[-1].digest), EpisodeEvent("reward", float(number)))
        later = replace(key, turn=number + 1)
        snapshots.append(EnvironmentSnapshot(later, number, parent, "basis", events, bytes([number])))
        parent = snapshots[-1].digest
    return stored, snapshots


@given(st.integers(1, 6), st.data())
def test_newest_snapshot_with_a_complete_history_is_used(count: int, data: st.DataObject) -> None:
    turns, snapshots = build_history(count)
    lost_turns = data.draw(st.sets(st.integers(0, count - 1), max_size=2))
    lost = data.draw(st.sets(st.integers(0, count - 1), max_size=2))
    changed = data.draw(st.none() | st.integers(0, count - 1))
    if changed is not None:
        snapshots[changed] = replace(snapshots[changed], data=b"another state")
    point = find_restore_point(
        [one for one in snapshots if one.number not in lost],
        {one.key.turn: one for one in turns if one.key.turn not in lost_turns},
    )
    usable = min([count, *lost_turns, *lost, *([] if changed is None else [changed + 1])])
    if not usable:
        assert point is None
        return
    assert point is not None
    assert (point.number, point.data) == (usable - 1, snapshots[usable - 1].data)
    made = [event.value.generation.tokens for event in point.events if event.kind == "turn"]
    assert made == [turn.tokens for turn in turns[:usable]]
    assert [event.value for event in point.events if event.kind == "reward"] == list(map(float, range(usable)))


def test_newer_snapshot_with_the_same_number_is_used() -> None:
    turns, snapshots = build_history(3)
    other = replace(snapshots[1], data=b"of a later scheduler")
    point = find_restore_point([*snapshots, other], dict(enumerate(turns)))
    assert point is not None
    assert (point.number, point.data) == (1, b"of a later scheduler")
