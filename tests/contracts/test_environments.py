"""The guarantees of every environment, tested on each kind. To test a new environment, add a line to CASES."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from rollflow.storage.audit.audit import audit
from rollflow.storage.errors import ConfigError, EngineFailed, RollflowError
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import Outcome, StopReason, Trajectory
from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.engines.base import Generation, GenerationRequest, TokenSpan
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.stop_strings import watch_stops
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.environments import build_environment
from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.environments.config import (
    EnvironmentConfig,
    FrozenLakeEnvironment,
    GymnasiumEnvironment,
    ImportEnvironment,
    ImportTool,
    KuhnPokerEnvironment,
    MixedEnvironment,
    SingleTurnEnvironment,
    SokobanEnvironment,
    TimedEnvironmentConfig,
    ToolsEnvironment,
    TrlEnvironment,
)
from rollflow.tasks.environments.foreign.play import ForeignEpisodes
from rollflow.tasks.environments.mixed import MixedEpisodes
from rollflow.tasks.environments.ports import EnvironmentPorts
from rollflow.tasks.environments.tool_use.config import PythonTool
from rollflow.tasks.environments.tool_use.play import ToolEpisodes
from rollflow.tasks.environments.tools import ToolResult, build_toolbox
from rollflow.tasks.games import describe_board
from rollflow.tasks.games.frozen_lake import FrozenLake
from rollflow.tasks.games.sokoban import Sokoban
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import Score
from rollflow.testing.environments import PROMPT, EnvironmentContract, build_ports
from tests.environments.worlds import GUESTS
from tests.support.log_runs import read
from tests.support.pipeline import Pipeline
from tests.support.user_code import FOLDER, put_in_reach
from tests.tasks.test_scheduler import trained

CASES: dict[str, EnvironmentConfig] = {
    "single-turn": SingleTurnEnvironment(),
    "timed": TimedEnvironmentConfig(median_turns=3, turn_tokens=4, step_seconds=0.01, step_sigma=0.005),
    "import": ImportEnvironment(path="letters.environments:SecondThought", options={"hint": [32, 33]}),
    "tool": ImportEnvironment(
        path="letters.environments:AskTool", tools={"count": ImportTool(path="letters.tools:count")}
    ),
    "trl": TrlEnvironment(path="odd_worlds:Quiet", folder=str(GUESTS)),
    "gymnasium": GymnasiumEnvironment(path="odd_worlds:Walk", folder=str(GUESTS)),
    "tools": ToolsEnvironment(python=PythonTool()),
    "mixed": MixedEnvironment(
        default="quiet", kinds={"quiet": TrlEnvironment(path="odd_worlds:Quiet", folder=str(GUESTS))}
    ),
}


# a game plays only prompts of its own kind, so each case has the game's section, the reference of a prompt, and an
# action
GAMES: dict[str, tuple[EnvironmentConfig, Mapping[str, Any], str]] = {
    "frozen-lake": (FrozenLakeEnvironment(), describe_board("frozen-lake", FrozenLake.read(3, "i/e:a"), "U"), "U"),
    "sokoban": (SokobanEnvironment(), describe_board("sokoban", Sokoban.read(3, "h/:gf"), "U"), "U"),
    "kuhn-poker": (KuhnPokerEnvironment(), {"deal": "QK"}, "p"),
}


def test_every_environment_kind_has_a_test_case() -> None:
    kinds = EnvironmentConfig.__origin__.__args__  # type: ignore[attr-defined]
    assert {type(config) for config in (*CASES.values(), *(config for config, *_ in GAMES.values()))} == set(kinds)


class TestGames(EnvironmentContract):
    """The environment contract, tested on each game."""

    @pytest.fixture(params=GAMES, autouse=True)
    def game(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
        name: str = request.param
        _, reference, said = GAMES[name]
        monkeypatch.setattr(type(self), "prompt", replace(PROMPT, reference=reference))
        monkeypatch.setattr(type(self), "said", said)
        return name

    @pytest.fixture
    def config(self, game: str) -> EnvironmentConfig:
        return GAMES[game][0]


class TestEnvironments(EnvironmentContract):
    """The environment contract, tested on each kind of environment."""

    @pytest.fixture(params=CASES.values(), ids=CASES)
    def config(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EnvironmentConfig:
        put_in_reach(monkeypatch, FOLDER)
        found: EnvironmentConfig = request.param
        return found

    def test_run_with_each_environment_passes_the_audit(
        self, environment: Environment, ports: EnvironmentPorts
    ) -> None:
        pipeline = Pipeline(
            MemoryStore("environment"),
            versions=4,
            async_ratio=1.0,
            # the schemas of tools also take tokens of the context
            longest=1000 if isinstance(environment, ToolEpisodes) else 64,
            environment=environment,
            environment_ports=ports,
        )
        # worker processes run in real time, and not on the virtual clock
        (asyncio.run if isinstance(environment, ForeignEpisodes | MixedEpisodes) else run_virtual)(pipeline.run())
        report = audit(pipeline.store)
        assert report.clean, report.violations
        assert report.versions == 4


def test_prompt_without_room_for_its_tools_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_reach(monkeypatch, FOLDER)
    config = TrlEnvironment(path="letters.guessing:HigherOrLower", max_failures=2)
    pipeline = Pipeline(
        MemoryStore("room"), versions=1, environment=build_environment(config), environment_ports=build_ports(config)
    )
    with pytest.raises(BaseExceptionGroup) as ended:
        asyncio.run(pipeline.run())
    assert ended.group_contains(ConfigError, match=r"2 episodes in a row failed .* leave no room for a response")


# --- episodes with several turns --------------------------------------------------------------------------


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


def test_environment_tokens_are_masked_out_of_the_loss() -> None:
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
    """If all turns had the same seed, each turn would repeat the tokens of the first turn."""
    pipeline = Pipeline(MemoryStore("seeds"), versions=1, environment=Turns(2), sigma=0.0)
    run_virtual(pipeline.run())
    for one in trajectories(pipeline):
        response = one.tokens[one.loss_mask.index(True) :]
        assert response[16:18] == (7, 8)
        assert response[:16] != response[18:34]


def test_surplus_episodes_are_aborted_between_turns() -> None:
    """Tokens of surplus episodes count as surplus tokens, like the tokens of aborted requests."""
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


class Speaking(TimedEngine):
    """A timed engine that generates one text in the first turn, and another text after the text `told`, up to a stop
    string.
    """

    def __init__(self, first: str, told: str, then: str) -> None:
        super().__init__(TimedEngineConfig(max_concurrent_requests=8, sigma=0.0, max_new_tokens=64))
        self._texts = first, told, then

    async def generate(self, request: GenerationRequest) -> Generation:
        await super().generate(replace(request, max_new_tokens=1))
        first, told, then = self._texts
        is_told = told in "".join(map(chr, list(request.prompt.flat)[3:]))
        tokens = [ord(letter) for letter in (then if is_told else first)][: request.max_new_tokens]
        end = watch_stops(request.stop, None).find_end(tokens)
        said = TokenSpan.of(tokens[:end], [-1.0] * len(tokens[:end]), [self.version] * len(tokens[:end]))
        return Generation(request.id, said, StopReason.STOP)


def test_environment_can_use_stop_strings_and_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two turns with a tool: a stop string ends the first turn, and the second turn reads the tool's result."""
    put_in_reach(monkeypatch, FOLDER)
    engine = Speaking("Let me ask <a:banana> and see", "=3, so ", "it is 3")
    pipeline = Pipeline(
        MemoryStore("ports"),
        versions=2,
        engine_list=[engine],
        environment=build_environment(ImportEnvironment(path="letters.environments:AskTool", options={"budget": 40})),
        environment_ports=build_ports(CASES["tool"]),
    )
    run_virtual(pipeline.run())
    assert audit(pipeline.store).clean
    for one in trajectories(pipeline):
        text = "".join(map(chr, one.tokens[3:]))
        assert text == "Let me ask <a:banana>=3, so it is 3"
        given = [chr(token) for token, mine in zip(one.tokens[3:], one.loss_mask[3:], strict=True) if not mine]
        assert "".join(given) == "=3, so "
        assert one.outcome is (Outcome.CORRECT if one.reward else Outcome.WRONG)


def test_episode_ends_at_its_token_budget() -> None:
    """If the token budget cuts the tool call off, there is no call, so the first answer is judged."""
    engine = Speaking("<a:banana>", "=3, so ", "3")
    pipeline = Pipeline(
        MemoryStore("budget"),
        versions=1,
        engine_list=[engine],
        environment=Budget(),
        environment_ports=build_ports(CASES["tool"]),
    )
    run_virtual(pipeline.run())
    assert audit(pipeline.store).clean
    for one in trajectories(pipeline):
        assert "".join(map(chr, one.tokens[3:])) == "<a:b<a:<a:banana>"
        assert one.reward_parts == {"first": 4.0, "seconds": one.reward_parts["seconds"]}
        assert one.reward_parts["seconds"] > 0


class Budget(Environment):
    """An environment of three turns with different token budgets, whose score has parts."""

    async def play(self, episode: Episode) -> Score | None:
        began = episode.ports.clock()
        first = await episode.generate(max_tokens=4)
        second = await episode.generate(max_tokens=3)
        third = await episode.generate(max_tokens=1000)
        if first is None or second is None or third is None:
            return None
        scored = await episode.score(first.tokens, {})
        parts = {"first": float(len(first.tokens)), "seconds": episode.ports.clock() - began}
        return Score(scored.value, "in three turns", parts=parts)


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("count", {"letter": "a", "word": "banana"}, "=3, so "),
        ("sum", {}, "there is no tool 'sum'; the tools are count"),
        (["count"], {}, "there is no tool ['count']; the tools are count"),
        ("x" * 1000, {}, "there is no tool '" + "x" * 182 + "; the tools are count"),
        ("count", ["a"], "count failed: the arguments are a list, not an object"),
        ("count", {"letter": "a"}, "count failed: TypeError: count() missing 1 required positional argument: 'word'"),
        ("count", {"letter": "a", "word": 1}, "count failed: AttributeError: 'int' object has no attribute 'count'"),
    ],
)
def test_failed_tool_call_returns_an_error_result(
    monkeypatch: pytest.MonkeyPatch, name: Any, arguments: Any, text: str
) -> None:
    put_in_reach(monkeypatch, FOLDER)
    result = run_virtual(build_ports(CASES["tool"]).tools.call(name, arguments))
    assert (result.text, result.is_error) == (text, "=" not in text)


async def sleepy(hours: float = 1.0) -> ToolResult:
    """Sleep for the given number of hours."""
    await asyncio.sleep(3600 * hours)
    return ToolResult("at last")


def prompt(hours: float) -> ToolResult:
    """Return a text; the function is not asynchronous, although a tool must be."""
    return ToolResult("")


def test_slow_tool_call_returns_an_error_at_its_deadline() -> None:
    tools = build_toolbox({"sleepy": ImportTool(path=f"{__name__}:sleepy", seconds=5)})
    result = run_virtual(tools.call("sleepy", {}))
    assert result == ToolResult("sleepy failed: it took more than 5 s", is_error=True)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (ImportTool(path=f"{__name__}:prompt"), r"tools\.now\.path = .*: the function is not asynchronous; define it"),
        (ImportTool(path="os:system"), r"not name a function that is annotated to return rollflow's ToolResult"),
        (ImportTool(path=f"{__name__}:sleepy", options={"days": 1}), r"tools\.now\.options = .*'days'"),
    ],
)
def test_tool_with_a_wrong_signature_is_refused(part: ImportTool, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_toolbox({"now": part})


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"stop": ("",)}, "a stop string must not be empty"),
        ({"stop": (13,)}, "the stop string 13 is not a string"),
        ({"stop": ("\ud800",)}, "surrogates not allowed"),
        ({"max_tokens": 1.5}, "'float' object cannot be interpreted as an integer"),
        ({"max_tokens": 0}, "max_tokens = 0, but a generation has at least"),
    ],
)
def test_invalid_generation_request_fails_only_its_episode(wrong: dict[str, Any], reason: str) -> None:
    environment = own("request")
    environment._own.request = wrong  # type: ignore[attr-defined]
    pipeline = Pipeline(MemoryStore(reason), versions=1, sigma=0.0, environment=environment)
    run_virtual(pipeline.run())
    assert all(reason in one.reason and one.outcome is Outcome.UNPARSABLE for one in trajectories(pipeline))


def test_run_without_a_tokenizer_is_refused_with_a_reason() -> None:
    pipeline = Pipeline(MemoryStore("text"), versions=1, environment=own("text port"))
    with pytest.raises(BaseExceptionGroup) as ended:
        run_virtual(pipeline.run())
    assert ended.group_contains(
        ConfigError, match="this environment needs a tokenizer, but a run without a policy has none"
    )


ODD: dict[str, Any] = {"below": [-1], "part": [1.5], "word": ["a"], "above": [5, 300], "flat": Int32s.of([-7])}


class Odd(Environment):
    """An environment that fails in the way that its option `wrong` names."""

    request: Mapping[str, Any]

    def __init__(self, wrong: str) -> None:
        self.wrong = wrong

    async def play(self, episode: Episode) -> Score | None:
        if self.wrong == "silent":
            return Score(1.0, "without a word")
        await episode.generate()
        if self.wrong == "request":
            await episode.generate(**self.request)
        if self.wrong == "text port":
            episode.ports.tokenizer.decode((1,))
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
        ("nan", "environment failed: ValueError: the score's value is nan, which is not a finite float32 number"),
        ("nothing", "the episode ended without a reward"),
        (
            "below",
            "environment failed: ValueError: -1 is not a token of the policy, whose 300 tokens are numbered 0 to 299",
        ),
        (
            "above",
            "environment failed: ValueError: 300 is not a token of the policy, whose 300 tokens are numbered 0 to 299",
        ),
        (
            "flat",
            "environment failed: ValueError: -7 is not a token of the policy, whose 300 tokens are numbered 0 to 299",
        ),
        (
            "judged",
            "environment failed: ValueError: 300 is not a token of the policy, whose 300 tokens are numbered 0 to 299",
        ),
        ("part", "environment failed: TypeError: 'float' object cannot be interpreted as an integer"),
        ("word", "environment failed: TypeError: 'str' object cannot be interpreted as an integer"),
        ("exit", "environment failed: SystemExit: 0"),
        ("text", "environment failed: TypeError: the scorer must return a Score or a number, not a str"),
        ("half", r"\ud83d"),
        ("unsaid", "None"),
    ],
)
def test_exception_in_an_episode_is_recorded_as_its_failure(wrong: str, reason: str) -> None:
    pipeline = Pipeline(MemoryStore(wrong), versions=1, environment=own(wrong), vocabulary=300)
    run_virtual(pipeline.run())
    assert {one.reward for one in trajectories(pipeline)} == {0.0}
    outcome = Outcome.WRONG if wrong in ("half", "nothing", "unsaid") else Outcome.UNPARSABLE
    assert {one.outcome for one in trajectories(pipeline)} == {outcome}
    named = reason.replace("environment", f"environment {__name__}:Odd", 1 if "failed" in reason else 0)
    assert all(one.reason.startswith(named) for one in trajectories(pipeline))


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [("silent", ConfigError, "in which the policy generated nothing"), ("engine", EngineFailed, "none is left")],
)
def test_run_fails_if_every_episode_fails(wrong: str, kind: type[RollflowError], words: str) -> None:
    pipeline = Pipeline(MemoryStore(wrong), versions=1, environment=own(wrong))
    with pytest.raises(BaseExceptionGroup) as ended:
        run_virtual(pipeline.run())
    _, others = ended.value.split(lambda error: type(error) is kind and words in str(error))
    assert others is None


def test_class_without_environment_methods_is_refused() -> None:
    with pytest.raises(ConfigError, match="the path does not name a class that derives from rollflow's Environment"):
        build_environment(ImportEnvironment(path=f"{__name__}:Pipeline"))
