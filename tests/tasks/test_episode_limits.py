"""Tests of the limits of an episode: turns, tokens and the environment's time. Each ends the episode with a reason."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from rollflow.storage.audit.audit import audit
from rollflow.storage.model_input import ModelInput
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import DiscardReason, Outcome, Prompt, StopReason, Trajectory
from rollflow.tasks.engines.base import Generation, TokenSpan
from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.environments.config import EnvironmentConfig, ImportEnvironment, TimedEnvironmentConfig
from rollflow.tasks.environments.limits import EpisodeLimits
from rollflow.tasks.environments.limits_config import LimitedEnvironment
from rollflow.tasks.environments.ports import EnvironmentPorts
from rollflow.tasks.environments.timed import TimedEnvironment
from rollflow.tasks.rollout.episode import PlayedEpisode, Turn
from rollflow.tasks.rollout.proxy import VersionedGeneration
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import Score, ScoreRequest
from rollflow.testing.environments import CodePoints
from tests.support.pipeline import Pipeline
from tests.tasks.test_scheduler import trained

PROMPT = Prompt("p", 0, "test", "?", ModelInput.of((1, 2)))
WAIT = 1000.0  # virtual seconds that a generation and a score take


@dataclass
class Working(Environment):
    """Computes for `seconds` before each of `turns` turns, and after the last one."""

    turns: int = 3
    seconds: float = 0.0
    setup: float = 0.0
    stubborn: bool = False
    scores: bool = False

    async def play(self, episode: Episode) -> Score | None:
        await self.compute(self.setup)
        for _ in range(self.turns):
            if await episode.generate() is None:
                return None
            if self.scores:
                await episode.score(episode.response)
            await self.compute(self.seconds)
        return Score(1.0, "done")

    async def compute(self, seconds: float) -> None:
        if self.stubborn:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(seconds)
        elif seconds:
            await asyncio.sleep(seconds)


def play(environment: Environment, limits: EpisodeLimits, said: int = 5, text: str = "") -> Trajectory:
    [one] = play_score(environment, limits, said, text)[1]
    return one


def play_score(
    environment: Environment, limits: EpisodeLimits, said: int = 5, text: str = ""
) -> tuple[Score, tuple[Trajectory, ...]]:
    """Play an episode, and return its score and its trajectories. An episode without a generation has no trajectory."""

    async def ask(turn: Turn) -> VersionedGeneration:
        await asyncio.sleep(WAIT)
        tokens = list(map(ord, text)) or [5] * min(said, turn.max_new_tokens)
        span = TokenSpan.of(tokens, [-1.0] * len(tokens), [0] * len(tokens))
        return VersionedGeneration(Generation("", span, StopReason.STOP), 0)

    async def keep(_: PlayedEpisode) -> bool:
        return True

    async def score(request: ScoreRequest) -> Score:
        await asyncio.sleep(WAIT)
        return Score(1.0, "judged")

    async def run() -> tuple[Score, tuple[Trajectory, ...]]:
        ports = EnvironmentPorts(CodePoints(), limits=limits)
        episode = PlayedEpisode(PROMPT, 1000, ask, keep, score, ports=ports)
        found = await episode.play(environment)
        assert found is not None
        return found, () if episode.first is None else episode.trajectories(found)

    found: tuple[Score, tuple[Trajectory, ...]] = run_virtual(run())
    return found


@pytest.mark.parametrize(
    ("limits", "turns", "tokens", "reason"),
    [
        ({}, 3, 15, "done"),
        ({"max_turns": 3, "max_episode_tokens": 15}, 3, 15, "done"),
        ({"max_turns": 2}, 2, 10, "the episode reached environment.max_turns = 2"),
        ({"max_episode_tokens": 7}, 2, 7, "the episode reached environment.max_episode_tokens = 7"),
        ({"max_turn_tokens": 2}, 3, 6, "done"),
    ],
)
def test_limits_of_turns_and_tokens_end_an_episode(
    limits: dict[str, int], turns: int, tokens: int, reason: str
) -> None:
    one = play(Working(), EpisodeLimits(**limits))
    assert one.turn_starts is not None
    assert (len(one.turn_starts), one.response_tokens, one.reason) == (turns, tokens, reason)
    assert (one.reward, one.outcome) == ((1.0, Outcome.CORRECT) if reason == "done" else (0.0, Outcome.WRONG))


@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.parametrize(
    ("limits", "work", "late"),
    [
        ({"turn_seconds": 10.0}, {"seconds": 9.0}, ""),
        ({"turn_seconds": 10.0}, {"seconds": 9.0, "scores": True}, ""),
        ({"turn_seconds": 10.0}, {"seconds": 11.0}, "turn_seconds = 10"),
        ({"episode_seconds": 30.0}, {"seconds": 9.0, "setup": 2.0}, ""),
        ({"episode_seconds": 30.0}, {"seconds": 9.0, "setup": 4.0}, "episode_seconds = 30"),
        ({"turn_seconds": 10.0, "episode_seconds": 15.0}, {"seconds": 9.0}, "episode_seconds = 15"),
    ],
)
def test_time_of_the_environment_is_limited(
    limits: dict[str, float], work: dict[str, Any], late: str, *, stubborn: bool
) -> None:
    """Waits for generations and scores, which take far longer here, are not part of the environment's time."""
    one = play(Working(stubborn=stubborn, **work), EpisodeLimits(**limits))  # type: ignore[arg-type]
    expected = f"the environment took more than environment.{late} s" if late else "done"
    assert (one.reason, one.outcome) == (expected, Outcome.TIMEOUT if late else Outcome.CORRECT)
    assert one.reward == float(not late)


@pytest.mark.parametrize("stubborn", [False, True])
def test_episode_with_a_slow_setup_is_unjudged(*, stubborn: bool) -> None:
    score, trajectories = play_score(Working(setup=11.0, stubborn=stubborn), EpisodeLimits(turn_seconds=10.0))
    assert (score.outcome, trajectories) == (Outcome.UNJUDGED, ())
    assert score.reason == "the environment took more than environment.turn_seconds = 10 s"


@pytest.mark.parametrize(("setup", "is_late"), [(15.0, False), (21.0, True)])
def test_environment_setup_has_a_time_limit_of_its_own(setup: float, *, is_late: bool) -> None:
    limits = EpisodeLimits(setup_seconds=20.0, turn_seconds=10.0)
    score, _ = play_score(Working(setup=setup, seconds=9.0), limits)
    late = "the environment took more than environment.setup_seconds = 20 s"
    assert (score.reason, score.outcome) == ((late, Outcome.UNJUDGED) if is_late else ("done", Outcome.CORRECT))


class Scoring(Environment):
    """Gives a score at a limit. `Episode.limit` names the limit before and after the refused turn."""

    async def play(self, episode: Episode) -> Score | None:
        while await episode.generate() is not None:
            before = episode.limit
        assert episode.limit == before
        return Score(0.5, episode.limit)


def test_environment_scores_an_episode_that_reached_a_limit() -> None:
    one = play(Scoring(), EpisodeLimits(max_episode_tokens=12))
    assert (one.reward, one.response_tokens) == (0.5, 12)
    assert one.reason == "the episode reached environment.max_episode_tokens = 12"


class Keeping(Working):
    """Has `keeps_deadlines`, like environments in worker processes, which enforce their own deadlines."""

    keeps_deadlines = True


def test_environment_with_its_own_deadlines_is_not_stopped() -> None:
    assert play(Keeping(seconds=5.0), EpisodeLimits(turn_seconds=1.0)).reason == "done"


def test_episode_limits_apply_to_simulated_episodes() -> None:
    config = TimedEnvironmentConfig(median_turns=6, max_turns=4, max_turn_tokens=3, step_seconds=5.0)
    one = play(TimedEnvironment(config), config.limits)
    assert one.turn_starts is not None
    assert (len(one.turn_starts), sum(one.loss_mask)) == (4, 12)
    late = play(TimedEnvironment(config), config.model_copy(update={"turn_seconds": 4.0}).limits)
    assert (late.outcome, late.reason) == (
        Outcome.TIMEOUT,
        "the environment took more than environment.turn_seconds = 4 s",
    )


class Comparing(Environment):
    """Waits for scores of two texts at the same time, one of which takes longer, and works for nine seconds."""

    async def play(self, episode: Episode) -> Score | None:
        await episode.generate()
        first, second = asyncio.ensure_future(self.score(episode, 1)), asyncio.ensure_future(self.score(episode, 3))
        await asyncio.gather(first, second)
        await asyncio.sleep(9.0)
        await episode.generate()
        return Score(1.0, "done")

    async def score(self, episode: Episode, times: int) -> None:
        for _ in range(times):
            await episode.score(episode.response)


def test_waiting_for_scores_does_not_use_up_time_limits() -> None:
    one = play(Comparing(), EpisodeLimits(turn_seconds=10.0, episode_seconds=10.0))
    assert (one.reason, one.outcome) == ("done", Outcome.CORRECT)


class SlowOnce(Working):
    """An environment whose setup takes too long in the first three episodes."""

    played = 0

    async def play(self, episode: Episode) -> Score | None:
        self.played += 1
        self.setup = 5.0 if self.played <= 3 else 0.0
        return await super().play(episode)


def test_episodes_with_a_slow_setup_are_played_again() -> None:
    ports = EnvironmentPorts(limits=EpisodeLimits(turn_seconds=1.0))
    pipeline = Pipeline(MemoryStore("setup"), versions=2, environment=SlowOnce(1), environment_ports=ports)
    run_virtual(pipeline.run())
    assert audit(pipeline.store).clean
    assert pipeline.scheduler.counts.discards[DiscardReason.UNJUDGED] in (2, 3)
    rows = [one for _, batch in trained(pipeline.store) for group in batch.groups() for one in group.trajectories]
    assert {one.outcome for one in rows} == {Outcome.CORRECT}


class KilledOnce(Working):
    """An environment whose worker process is killed after a turn in the first three episodes."""

    keeps_deadlines = True
    played = 0

    async def play(self, episode: Episode) -> Score | None:
        self.played += 1
        if self.played > 3:
            return await super().play(episode)
        if await episode.generate() is None:
            return None
        return Score(0.0, "its process was killed by SIGKILL", Outcome.UNJUDGED)


def test_episodes_whose_process_was_killed_are_played_again() -> None:
    pipeline = Pipeline(MemoryStore("killed"), versions=2, environment=KilledOnce(1))
    run_virtual(pipeline.run())
    assert audit(pipeline.store).clean
    assert pipeline.scheduler.counts.discards[DiscardReason.UNJUDGED] in (2, 3)
    rows = [one for _, batch in trained(pipeline.store) for group in batch.groups() for one in group.trajectories]
    assert {one.outcome for one in rows} == {Outcome.CORRECT}


class Calling(Environment):
    """Reads the action of a single turn."""

    async def play(self, episode: Episode) -> Score | None:
        made = await episode.generate()
        assert made is not None
        action = episode.read_action(made.tokens)
        return Score(0.0, action.fault, Outcome.UNPARSABLE) if action.fault else Score(1.0)


@pytest.mark.parametrize(("penalty", "total"), [(0.0, 0.0), (0.25, -0.25)])
def test_malformed_action_costs_the_configured_penalty(penalty: float, total: float) -> None:
    limits = EpisodeLimits(unparsable_penalty=penalty)
    one = play(Calling(), limits, text="<tool_call>{</tool_call>")
    assert (one.outcome, one.total_reward) == (Outcome.UNPARSABLE, total)
    assert one.reason.startswith("unparsable action: ")
    assert play(Calling(), limits, text='<tool_call>{"name": "a"}</tool_call>').total_reward == 1.0


KEYS = st.fixed_dictionaries(
    {},
    optional={
        "max_turns": st.integers(1, 4),
        "max_turn_tokens": st.integers(1, 6),
        "max_episode_tokens": st.integers(1, 20),
        "setup_seconds": st.floats(1.0, 20.0),
        "turn_seconds": st.floats(1.0, 20.0),
        "episode_seconds": st.floats(1.0, 40.0),
        "unparsable_penalty": st.floats(0.0, 2.0),
    },
)


@settings(max_examples=40, deadline=None)
@given(KEYS, st.integers(1, 6), st.integers(1, 6), st.integers(0, 10), st.integers(0, 10))
def test_random_limits_hold_for_every_episode(
    keys: dict[str, Any], turns: int, said: int, seconds: int, setup: int
) -> None:
    limits = ImportEnvironment(path="a:b", **keys).limits
    score, rows = play_score(Working(turns, seconds=float(seconds), setup=float(setup)), limits, said)
    allowed = min(keys.get("setup_seconds", keys.get("turn_seconds", math.inf)), keys.get("episode_seconds", math.inf))
    assert (score.outcome is Outcome.UNJUDGED) == (not rows)
    if setup != allowed:
        assert bool(rows) == (setup < allowed)
    if not rows:
        return
    [one] = rows
    assert one.turn_starts is not None
    ends = [*one.turn_starts[1:], len(one.tokens)]
    lengths = [end - start for start, end in zip(one.turn_starts, ends, strict=True)]
    assert len(lengths) <= min(keys.get("max_turns", turns), turns)
    assert max(lengths) <= min(keys.get("max_turn_tokens", said), said)
    assert sum(lengths) <= keys.get("max_episode_tokens", turns * said)
    assert setup + seconds * (len(lengths) - 1) <= keys.get("episode_seconds", math.inf)
    if one.outcome is Outcome.CORRECT:
        assert len(lengths) == turns
        assert seconds <= keys.get("turn_seconds", math.inf)
    else:
        assert one.outcome in (Outcome.WRONG, Outcome.TIMEOUT)
        assert "environment." in one.reason


KINDS: dict[str, dict[str, Any]] = {
    "import": {"path": "a:b"},
    "trl": {"path": "a:b"},
    "gymnasium": {"id": "a"},
    "frozen-lake": {},
    "sokoban": {},
    "tools": {"python": {}},
    "timed": {},
}


def test_limits_are_tested_for_each_environment_with_turns() -> None:
    found = {one.model_fields["kind"].default for one in EnvironmentConfig.__origin__.__args__}  # type: ignore[attr-defined]
    # a game of Kuhn poker has at most three turns; `mixed` has the limits of its members (`test_mixed.py`)
    assert found - {"single-turn", "kuhn-poker", "mixed"} == set(KINDS)


@given(st.sampled_from(sorted(KINDS)), KEYS)
def test_all_environments_have_the_same_limits(kind: str, keys: dict[str, Any]) -> None:
    section: Any = TypeAdapter(EnvironmentConfig).validate_python({"kind": kind, **KINDS[kind], **keys})
    assert isinstance(section, LimitedEnvironment)
    assert {key: getattr(section.limits, key) for key in keys} == keys


def test_episodes_have_no_limits_by_default() -> None:
    assert ImportEnvironment(path="a:b").limits == EpisodeLimits()


def test_run_with_slow_environments_passes_the_audit() -> None:
    ports = EnvironmentPorts(limits=EpisodeLimits(turn_seconds=1.0))
    pipeline = Pipeline(
        MemoryStore("slow"), versions=2, environment=Working(2, seconds=5.0), environment_ports=ports,
        choices={"redundant_responses": 1, "on_stale": "drop"},
    )  # fmt: skip
    run_virtual(pipeline.run())
    assert audit(pipeline.store).clean
    rows = [one for _, batch in trained(pipeline.store) for group in batch.groups() for one in group.trajectories]
    assert {one.outcome for one in rows} == {Outcome.TIMEOUT}
