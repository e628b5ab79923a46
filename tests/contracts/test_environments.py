"""The guarantees of every environment, tested on each kind. To test a new environment, add a line to CASES."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from rollflow.storage.audit.audit import audit
from rollflow.storage.errors import ConfigError, EngineFailed, RollflowError
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.model_input import ModelInput
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import Prompt, StopReason, Trajectory
from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.engines.base import Generation, TokenSpan
from rollflow.tasks.environments import build_environment
from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.environments.config import EnvironmentConfig, ImportEnvironment, SingleTurnEnvironment
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import Score
from tests.support.log_runs import read
from tests.support.pipeline import Pipeline
from tests.support.user_code import FOLDER, put_in_reach
from tests.tasks.test_scheduler import trained

CASES: dict[str, EnvironmentConfig] = {
    "single-turn": SingleTurnEnvironment(),
    "import": ImportEnvironment(path="letters.environments:SecondThought", options={"hint": [32, 33]}),
}
PROMPT = Prompt("p", 0, "test", "How many?", ModelInput.of((1, 2, 3)), {"answer": "1"})


@pytest.fixture(params=CASES.values(), ids=CASES)
def environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Environment:
    put_in_reach(monkeypatch, FOLDER)
    return build_environment(request.param)


@dataclass
class Scripted:
    """An `Episode` that ends after `turns` generations, and records all calls."""

    turns: int = 100
    longest: int = 40
    prompt: Prompt = PROMPT
    response: tuple[int, ...] = ()
    asked: list[str] = field(default_factory=list)

    @property
    def room(self) -> int:
        return self.longest - len(self.response)

    async def generate(self) -> Generation | None:
        self.asked.append("generate")
        await asyncio.sleep(0)
        if self.asked.count("generate") > self.turns or self.room <= 0:
            return None
        tokens = tuple(range(100, 100 + min(5, self.room)))
        self.response += tokens
        return Generation("", TokenSpan.of(tokens, (-1.0,) * len(tokens), (0,) * len(tokens)), StopReason.STOP)

    def add(self, tokens: Sequence[int]) -> None:
        assert len(tokens) <= self.room
        self.asked.append("add")
        self.response += tuple(tokens)

    async def judge(self, tokens: Sequence[int]) -> Score | None:
        self.asked.append("judge")
        return Score(float(sum(tokens) % 7), "judged")


def test_there_is_a_case_for_every_kind() -> None:
    kinds = EnvironmentConfig.__origin__.__args__  # type: ignore[attr-defined]
    assert {type(config) for config in CASES.values()} == set(kinds)


async def test_episode_generates_and_ends_with_a_finite_reward(environment: Environment) -> None:
    episode = Scripted()
    score = await environment.play(episode)
    assert score is not None
    assert math.isfinite(score.value)
    assert score.reason
    assert "generate" in episode.asked


@pytest.mark.parametrize("turns", range(3))
async def test_ended_episode_is_left_at_once(environment: Environment, turns: int) -> None:
    episode = Scripted(turns=turns)
    score = await environment.play(episode)
    if episode.asked.count("generate") > turns:
        assert episode.asked[-1] == "generate"
        assert score is None


@pytest.mark.parametrize("longest", range(1, 12))
async def test_environment_plays_with_any_room(environment: Environment, longest: int) -> None:
    episode = Scripted(longest=longest)
    assert await environment.play(episode) is not None
    assert len(episode.response) <= longest


async def test_concurrent_episodes_do_not_affect_each_other(environment: Environment) -> None:
    async def played(longest: int) -> tuple[Score | None, tuple[int, ...], list[str]]:
        episode = Scripted(longest=longest)
        return await environment.play(episode), episode.response, episode.asked

    alone = [await played(longest) for longest in range(1, 30)]
    assert await asyncio.gather(*(played(longest) for longest in range(1, 30))) == alone


def test_run_with_the_environment_audits_clean(environment: Environment) -> None:
    pipeline = Pipeline(MemoryStore("environment"), versions=4, async_ratio=1.0, environment=environment)
    run_virtual(pipeline.run())
    report = audit(pipeline.store)
    assert report.clean, report.violations
    assert report.versions == 4


# --- several turns ----------------------------------------------------------------------------------------


class Turns(Environment):
    """An environment that plays up to `most` turns, and adds two tokens of its own between turns."""

    def __init__(self, most: int = 3) -> None:
        self.most = most

    async def play(self, episode: Episode) -> Score | None:
        for turn in range(self.most):
            if turn and episode.room > 2:
                episode.add((7, 8))
            made = await episode.generate()
            if made is None:
                return None
        return Score(1.0, "it kept on")


def trajectories(pipeline: Pipeline) -> list[Trajectory]:
    """Return all trajectories on which the pipeline has trained."""
    groups = [group for _, batch in trained(pipeline.store) for group in batch.groups()]
    return [one for group in groups for one in group.trajectories]


def test_tokens_of_an_environment_are_masked() -> None:
    pipeline = Pipeline(MemoryStore("turns"), versions=3, async_ratio=1.0, environment=Turns())
    run_virtual(pipeline.run())
    assert audit(pipeline.store).clean
    several = 0
    for one in trajectories(pipeline):
        given = one.loss_mask.index(True)
        added = [at for at in range(given, len(one.tokens)) if not one.loss_mask[at]]
        assert [one.tokens[at] for at in added] == [7, 8] * (len(added) // 2)
        assert all(one.versions[at] == -1 and one.logprobs[at] == 0.0 for at in added)
        assert all(
            version >= one.started_version for version, mine in zip(one.versions, one.loss_mask, strict=True) if mine
        )
        assert len(one.tokens) - given <= 64
        several += bool(added)
    assert several


def test_each_turn_has_its_own_seed() -> None:
    """With the same seed, each turn would repeat the first turn's tokens."""
    pipeline = Pipeline(MemoryStore("seeds"), versions=1, environment=Turns(2), sigma=0.0)
    run_virtual(pipeline.run())
    for one in trajectories(pipeline):
        response = one.tokens[one.loss_mask.index(True) :]
        assert response[16:18] == (7, 8)
        assert response[:16] != response[18:34]


def test_surplus_episodes_are_dropped_between_turns() -> None:
    """Tokens of dropped episodes count as surplus tokens, as tokens of aborted requests do."""
    choices = {"redundant_responses": 2, "on_stale": "drop"}
    pipeline = Pipeline(MemoryStore("extra"), versions=4, environment=Turns(3), choices=choices)
    run_virtual(pipeline.run())
    assert audit(pipeline.store).clean
    assert pipeline.scheduler.counts.surplus_tokens > 0
    assert len(trajectories(pipeline)) == 4 * pipeline.groups * pipeline.group_size


class Thinking(Environment):
    """An environment in which every second episode pauses for ten seconds before its second turn."""

    def __init__(self) -> None:
        self.played = 0

    async def play(self, episode: Episode) -> Score | None:
        thinks, self.played = self.played % 2, self.played + 1
        made = await episode.generate()
        if made is not None and thinks:
            await asyncio.sleep(10.0)
            made = await episode.generate()
        return None if made is None else Score(1.0, "said")


def test_episode_is_interrupted_between_two_turns() -> None:
    """Between two turns, an episode has no request that could be aborted, so the episode itself is interrupted."""
    choices = {"redundant_responses": 1, "on_stale": "drop"}
    store = MemoryStore("between")
    pipeline = Pipeline(store, versions=2, group_size=1, sigma=0.0, environment=Thinking(), choices=choices)
    run_virtual(pipeline.run())
    [first, *others] = trajectories(pipeline)
    assert {len(one.tokens) for one in others} == {len(first.tokens)}
    surplus = [entry.body.surplus_tokens for entry in read(store) if isinstance(entry.body, BatchCommitted)]
    assert surplus == [pipeline.groups * first.response_tokens] * 2


ODD: dict[str, Any] = {"below": [-1], "part": [1.5], "word": ["a"], "above": [5, 300], "flat": Int32s.of([-7])}


class Odd(Environment):
    """An environment that fails in the way that its option names."""

    def __init__(self, wrong: str) -> None:
        self.wrong = wrong

    async def play(self, episode: Episode) -> Score | None:
        if self.wrong == "silent":
            return Score(1.0, "without a word")
        await episode.generate()
        if self.wrong == "error":
            raise LookupError("no such room")
        if self.wrong == "exit":
            raise SystemExit(0)
        if self.wrong == "text":
            return "good"  # type: ignore[return-value]
        if self.wrong == "half":
            return Score(0.0, "\ud83d")
        if self.wrong == "unsaid":
            return Score(0.0, None)  # type: ignore[arg-type]
        if self.wrong in ODD:
            episode.add(ODD[self.wrong])
        if self.wrong == "judged":
            await episode.judge(Int32s.of([300]))
        if self.wrong == "full":
            episode.add((1,) * 65)
        if self.wrong == "engine":
            raise EngineFailed("none is left")
        return Score(math.nan, "?") if self.wrong == "nan" else None


def own(wrong: str) -> Environment:
    return build_environment(ImportEnvironment(path=f"{__name__}:Odd", options={"wrong": wrong}))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("error", "environment failed: LookupError: no such room"),
        ("full", "environment failed: ValueError: 65 tokens do not fit into the response"),
        ("nan", "environment failed: ValueError: its value is nan"),
        ("nothing", "the episode ended without a reward"),
        ("below", "environment failed: ValueError: -1 is not a token of the policy, whose 300 tokens are 0 to 299"),
        ("above", "environment failed: ValueError: 300 is not a token of the policy, whose 300 tokens are 0 to 299"),
        ("flat", "environment failed: ValueError: -7 is not a token of the policy, whose 300 tokens are 0 to 299"),
        ("judged", "environment failed: ValueError: 300 is not a token of the policy, whose 300 tokens are 0 to 299"),
        ("part", "environment failed: TypeError: 'float' object cannot be interpreted as an integer"),
        ("word", "environment failed: TypeError: 'str' object cannot be interpreted as an integer"),
        ("exit", "environment failed: SystemExit: 0"),
        ("text", "environment failed: TypeError: it returned a str, not a Score or a number"),
        ("half", r"\ud83d"),
        ("unsaid", "None"),
    ],
)
def test_fault_in_an_episode_becomes_its_reason(wrong: str, reason: str) -> None:
    pipeline = Pipeline(MemoryStore(wrong), versions=1, environment=own(wrong), vocabulary=300)
    run_virtual(pipeline.run())
    assert {one.reward for one in trajectories(pipeline)} == {0.0}
    named = reason.replace("environment", f"environment {__name__}:Odd", 1 if "failed" in reason else 0)
    assert all(one.reason.startswith(named) for one in trajectories(pipeline))


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [("silent", ConfigError, "without a generation"), ("engine", EngineFailed, "none is left")],
)
def test_fault_of_all_episodes_ends_the_run(wrong: str, kind: type[RollflowError], words: str) -> None:
    pipeline = Pipeline(MemoryStore(wrong), versions=1, environment=own(wrong))
    with pytest.raises(BaseExceptionGroup) as ended:
        run_virtual(pipeline.run())
    _, others = ended.value.split(lambda error: type(error) is kind and words in str(error))
    assert others is None


def test_class_that_is_no_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match="the path does not name a class that derives from rollflow's Environment"):
        build_environment(ImportEnvironment(path=f"{__name__}:Scripted"))
