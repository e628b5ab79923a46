"""Tests the contract of environments, which `rollflow.tasks.environments.base` describes."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest

from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import Prompt, StopReason
from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.engines.base import Generation, TokenSpan
from rollflow.tasks.environments import build_environment
from rollflow.tasks.environments.base import Environment, charge_unparsable
from rollflow.tasks.environments.config import EnvironmentConfig, ImportEnvironment
from rollflow.tasks.environments.conversation import Conversation
from rollflow.tasks.environments.limits import NO_LIMITS
from rollflow.tasks.environments.limits_config import LimitedEnvironment
from rollflow.tasks.environments.ports import EnvironmentPorts, Message
from rollflow.tasks.environments.tool_calls import Action, parse_action
from rollflow.tasks.environments.tools import build_toolbox
from rollflow.tasks.environments.turns import LivedEpisode, LivedTurn
from rollflow.tasks.policies.renderer import PolicyRenderer
from rollflow.tasks.scorers.base import Score, check_number, is_failure
from rollflow.testing.bounds import HANG_SECONDS, call_bounded, import_keys, list_blocking_calls, run_bounded

PROMPT = Prompt("p", 0, "test", "How many?", ModelInput.of((1, 2, 3)), {"answer": "1"})
MOST_CALLS = 1000  # an episode with more generations than this counts as one that never ends


class CodePoints:
    """A tokenizer whose tokens are code points."""

    def encode_response(self, text: str) -> list[int]:
        return list(map(ord, text))

    def cut_control(self, text: str) -> str:
        return text  # no code point is a control token

    cut_message = cut_control

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    def decode_response(self, tokens: Sequence[int], special: bool = True) -> str:
        return self.decode(tokens)


def build_ports(config: EnvironmentConfig) -> EnvironmentPorts:
    """Build the ports of an environment with its tools; a token is a code point."""
    limits = config.limits if isinstance(config, LimitedEnvironment) else NO_LIMITS
    renderer, toolbox = PolicyRenderer(CodePoints(), ()), build_toolbox(config.tool_parts)  # type: ignore[arg-type]
    return EnvironmentPorts(CodePoints(), renderer, toolbox, limits=limits)


@dataclass
class ScriptedEpisode:
    """An `Episode` that ends after `turns` generations, and records the calls and the fault of its environment."""

    ports: EnvironmentPorts
    prompt: Prompt = PROMPT
    turns: int = 100
    longest: int = 40
    said: str = "<b:b>"
    id: str = "0.0.0"
    is_recalled: bool = False
    response: tuple[int, ...] = ()
    asked: list[str] = field(default_factory=list)
    lived: LivedEpisode = field(default_factory=LivedEpisode)
    talk: Conversation = field(default_factory=Conversation)
    # prompts and conversations of the roles that do not act at the moment
    roles: dict[str, tuple[Prompt, Conversation]] = field(default_factory=dict)
    fault: str = ""
    snapshot: bytes | None = None
    keeps_snapshots: bool = False
    snapshots: list[bytes] = field(default_factory=list)
    saved: ScriptedEpisode | None = None  # the episode as it continues from its newest snapshot
    forgotten: str = ""  # why the turns before a crash are not recalled
    seed: int = 0
    attempt: int = 0

    @property
    def room(self) -> int:
        return self.longest - len(self.response)

    @property
    def generated(self) -> int:
        return sum(turn.end - turn.start for branch in self.lived.branches for turn in branch.turns)

    @property
    def turn_id(self) -> str:
        made = sum(len(branch.turns) for branch in self.lived.branches)
        return f"{self.id}.{made - 1}" if self.id and made else ""

    def save_snapshot(self, data: bytes) -> None:
        if not isinstance(data, bytes):
            self._fail(f"a snapshot must be bytes, and it is a {type(data).__name__}")
        self.snapshots.append(data)
        lived = copy.deepcopy(self.lived)
        self.saved = replace(self, snapshot=data, snapshots=[], saved=None, asked=[], lived=lived, turns=100)

    def forget_turns(self, reason: str) -> None:
        self.forgotten = reason

    @property
    def limit(self) -> str:
        return self.ports.limits.find_reached(self.asked.count("generate"), self.generated)

    async def generate(self, stop: Sequence[str] = (), max_tokens: int | None = None) -> Generation | None:
        is_over = bool(self.limit)
        self.asked.append("generate")
        if len(self.asked) > MOST_CALLS:
            self._fail(f"an environment must end its episode, and it asked for more than {MOST_CALLS} generations")
        await asyncio.sleep(0)
        if self.asked.count("generate") > self.turns or self.room <= 0 or is_over:
            return None
        longest = self.ports.limits.bound_turn(self.room, self.generated)
        tokens = tuple(map(ord, self.said[: min(longest, max_tokens or longest)]))
        self.response += tokens
        made = Generation("", TokenSpan.of(tokens, (-1.0,) * len(tokens), (0,) * len(tokens)), StopReason.STOP)
        self.lived.add_generation(made)
        return made

    def add(self, tokens: Sequence[int]) -> None:
        if len(tokens) > self.room:
            self._fail(f"an environment must not add more than `room` tokens: {len(tokens)} for a room of {self.room}")
        self.asked.append("add")
        self.lived.current.add_given(Int32s.of(tokens))
        self.response += tuple(tokens)

    def start_branch(self, tokens: Sequence[int]) -> None:
        if len(tokens) > self.longest:
            self._fail(f"a branch must fit into a response, and {len(tokens)} tokens are more than {self.longest}")
        self.asked.append("start_branch")
        self.lived.start_branch(Int32s.of(tokens))
        self.response = tuple(tokens)

    def take_role(self, name: str) -> None:
        before = self.lived.role
        try:
            self.lived.take_role(name)
        except (TypeError, ValueError) as error:
            self._fail(f"an environment must name a role by a short string: {error}")
        self.asked.append("take_role")
        self.roles[before] = self.prompt, self.talk
        self.prompt, self.talk = self.roles.get(name) or (self.roles[""][0], Conversation())
        self.response = tuple(self.lived.current.made.tokens)

    def extend(self, messages: Sequence[Message]) -> bool:
        if len(self.response) == self.talk.begun:
            self._fail("an environment must extend an episode only after a generation")
        talk, found = self.talk.extend(self.ports.renderer, self.prompt, Int32s.of(self.response), messages)
        if len(found.tokens) >= (self.longest if found.branches else self.room):
            return False
        if found.branches:
            self.start_branch(found.tokens)
        else:
            self.add(found.tokens)
        self.talk = talk.add_messages(messages, len(self.response), branches=found.branches)
        return True

    async def extend_apart(self, messages: Sequence[Message]) -> bool:
        return self.extend(messages)

    def read_action(self, tokens: Sequence[int]) -> Action:
        action = parse_action(self.ports.tokenizer.decode_response(tokens))
        if action.fault:
            charge_unparsable(self)
        return action

    def reward(self, value: float) -> None:
        try:
            self.lived.add_reward(check_number("the reward of a turn", value))
        except (TypeError, ValueError) as error:
            self._fail(f"an environment must give a finite reward after a generation: {error}")

    def enter_state(self, key: str) -> None:
        try:
            self.lived.enter_state(key)
        except TypeError as error:
            self._fail(f"an environment must name a state by a string: {error}")

    def replace_prompt(self, tokens: Sequence[int]) -> None:
        if self.response:
            self._fail("an environment must replace the prompt before the first generation")
        self.asked.append("replace_prompt")
        self.prompt = replace(self.prompt, input=ModelInput.of(tokens))

    async def score(self, tokens: Sequence[int], reference: Mapping[str, Any] | None = None) -> Score:
        return Score(float(sum(tokens) % 7), "scored")

    async def judge(self, tokens: Sequence[int]) -> Score | None:
        self.asked.append("judge")
        return Score(float(sum(tokens) % 7), "judged")

    def _fail(self, fault: str) -> None:
        self.fault = fault
        raise AssertionError(fault)


class WaitingEpisode(ScriptedEpisode):
    """An episode whose first generation never ends."""

    async def generate(self, stop: Sequence[str] = (), max_tokens: int | None = None) -> Generation | None:
        self.asked.append("generate")
        await asyncio.Event().wait()
        return None


class EnvironmentContract:
    """Tests of an environment. A subclass names the class by `path`; `said` is what the policy says in each turn."""

    path: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    tools: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    prompt: ClassVar[Prompt] = PROMPT
    said: ClassVar[str] = "<b:b>"
    hang_seconds: ClassVar[float] = HANG_SECONDS

    @pytest.fixture
    def config(self) -> EnvironmentConfig:
        """Return the section of the environment under test; a subclass may override this fixture."""
        return ImportEnvironment.model_validate({**import_keys(type(self)), "tools": self.tools})

    @pytest.fixture
    def environment(self, config: EnvironmentConfig) -> Environment:
        return build_environment(config)

    @pytest.fixture
    def ports(self, config: EnvironmentConfig) -> EnvironmentPorts:
        return build_ports(config)

    def begin(self, ports: EnvironmentPorts, turns: int = 100, longest: int = 40) -> ScriptedEpisode:
        """Return an episode that ends after `turns` generations and has room for `longest` tokens."""
        return ScriptedEpisode(ports, self.prompt, turns, longest, self.said)

    def play(self, environment: Environment, *episodes: ScriptedEpisode) -> list[Score | None]:
        """Play episodes concurrently; fail if the environment breaks its contract in one of them."""

        async def play_all() -> list[Any]:
            return await asyncio.gather(*map(environment.play, episodes))

        scores = run_bounded(play_all(), "an episode", self.hang_seconds)
        for episode, score in zip(episodes, scores, strict=True):
            assert not episode.fault, episode.fault
            assert score is None or not is_failure(score), (
                f"an episode must end with a score or None, but: {score.reason}"
            )
        return scores

    def test_episode_generates_and_ends_with_a_finite_reward(
        self, environment: Environment, ports: EnvironmentPorts
    ) -> None:
        episode = self.begin(ports)
        [score] = self.play(environment, episode)
        assert score is not None, "an episode that may go on must end with a reward"
        assert math.isfinite(score.value), f"a reward must be a finite number, but it is {score.value}"
        assert "generate" in episode.asked, "an episode must have at least one generation"

    @pytest.mark.parametrize("turns", range(3))
    def test_ended_episode_is_closed_at_once(
        self, environment: Environment, ports: EnvironmentPorts, turns: int
    ) -> None:
        episode = self.begin(ports, turns=turns)
        [score] = self.play(environment, episode)
        if episode.asked.count("generate") > turns:
            assert episode.asked[-1] == "generate", (
                f"after `generate` returned None an environment must return, but it called {episode.asked[-1]}"
            )
            assert score is None, "an episode that is not wanted any more must end with None"

    @pytest.mark.parametrize("longest", range(1, 12))
    def test_episode_ends_with_a_reward_for_any_remaining_context(
        self, environment: Environment, ports: EnvironmentPorts, longest: int
    ) -> None:
        episode = self.begin(ports, longest=longest)
        [score] = self.play(environment, episode)
        assert score is not None, f"an episode with room for {longest} tokens must end with a reward"

    def test_concurrent_episodes_do_not_affect_each_other(
        self, environment: Environment, ports: EnvironmentPorts
    ) -> None:
        """An environment keeps no state between episodes, because an episode is played again after a crash."""

        def play(together: bool) -> list[tuple[Score | None, tuple[int, ...], list[str], list[list[LivedTurn]]]]:
            episodes = [[self.begin(ports, longest=longest)] for longest in range(1, 30)]
            groups = [[one for [one] in episodes]] if together else episodes
            scores = [score for group in groups for score in self.play(environment, *group)]
            played = [episode for [episode] in episodes]
            pairs = zip(scores, played, strict=True)
            turns = [[branch.turns for branch in one.lived.branches] for one in played]
            return [(score, one.response, one.asked, lived) for (score, one), lived in zip(pairs, turns, strict=True)]

        assert play(together=True) == play(together=False), (
            "an episode must be the same alone and beside others, so keep no state in `self`"
        )

    @pytest.mark.parametrize("turns", [1, 2])
    def test_episode_continues_from_its_snapshot(
        self, environment: Environment, ports: EnvironmentPorts, turns: int
    ) -> None:
        """An environment need not store snapshots."""
        whole, dying = self.begin(ports), self.begin(ports, turns=turns)
        whole.keeps_snapshots = dying.keeps_snapshots = True
        [score] = self.play(environment, whole)
        self.play(environment, dying)
        if (after := dying.saved) is None:
            return
        [continued] = self.play(environment, after)
        assert "replace_prompt" not in after.asked, "an episode that continues from a snapshot must not begin again"
        turns_of = [[branch.turns for branch in one.lived.branches] for one in (after, whole)]
        assert (continued, after.response, turns_of[0]) == (score, whole.response, turns_of[1]), (
            "an episode that continues from a snapshot must be the same as without a crash, so restore all state"
        )

    def test_environment_never_blocks_the_event_loop(self, environment: Environment, ports: EnvironmentPorts) -> None:
        async def play() -> None:
            await environment.play(self.begin(ports))

        blocking = call_bounded(
            lambda: list_blocking_calls(lambda: asyncio.run(play())), "an episode", self.hang_seconds
        )
        assert not blocking, f"an environment must await and never block, but it called {blocking}"

    def test_cancelled_episode_ends(self, environment: Environment, ports: EnvironmentPorts) -> None:
        """If an episode is not needed any more, its asyncio task is cancelled."""
        episode = WaitingEpisode(ports, self.prompt)

        async def cancel() -> None:
            task = asyncio.ensure_future(environment.play(episode))
            while not episode.asked and not task.done():
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task], timeout=self.hang_seconds)
            assert task.cancelled(), "a cancelled episode must end at once, so do not catch CancelledError"

        run_bounded(cancel(), "a cancelled episode", 2 * self.hang_seconds)
