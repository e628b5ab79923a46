"""Tests that demonstrations for TRL and gymnasium environments have the same tokens as episodes, including the first
observation and the tools. If the chat template rewrites earlier answers, both begin a branch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Prompt, StopReason, Trajectory
from rollflow.tasks.engines.base import Generation, TokenSpan
from rollflow.tasks.environments.config import GymnasiumEnvironment, TrlEnvironment
from rollflow.tasks.environments.foreign.guest_process import list_marked
from rollflow.tasks.environments.foreign.play import ForeignEpisodes
from rollflow.tasks.environments.ports import EnvironmentPorts
from rollflow.tasks.policies.demonstrations import Demonstration
from rollflow.tasks.policies.renderer import PolicyRenderer
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.prompts.base import DemonstratedTurn, Question
from rollflow.tasks.rollout.episode import PlayedEpisode, Turn
from rollflow.tasks.rollout.proxy import VersionedGeneration
from rollflow.tasks.run.cold_start.demonstrated_episodes import DemonstratedEpisodes
from rollflow.tasks.scorers.base import Score, ScoreRequest
from tests.environments.test_tool_demonstrations import (
    DOMAIN,
    END,
    QUESTION,
    TEMPLATES,
    THOUGHT,
    build_prompt,
    encoder_of,
    list_tokens,
    open_policy,
)
from tests.environments.worlds import build, call, find_mark, gym, trl

CONFIGS: Mapping[str, TrlEnvironment | GymnasiumEnvironment] = {"trl": trl("Counter"), "gymnasium": gym()}
ACTIONS = {"trl": [call("double"), call("add", number=2), call("fly")], "gymnasium": ["0", "1", "jump"]}
ROW = {"answer": "3"}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, PolicyTokenizer]:
    folder = tmp_path_factory.mktemp("policies")
    return {name: open_policy(folder / name.replace(" ", "-"), template) for name, template in TEMPLATES.items()}


class World:
    """An environment, and the demonstrations of it with each policy."""

    def __init__(self, kind: str, tokenizers: Mapping[str, PolicyTokenizer]) -> None:
        self.environment, self._runner = build(CONFIGS[kind]), asyncio.Runner()
        self.encoders = {name: encoder_of(CONFIGS[kind], tokenizer) for name, tokenizer in tokenizers.items()}

    def play(self, ports: EnvironmentPorts, prompt: Prompt, responses: Sequence[str]) -> tuple[Trajectory, ...]:
        """Play an episode in which the policy gives these responses, and then leaves."""

        async def ask(turn: Turn) -> VersionedGeneration | None:
            if turn.number == len(responses):
                return None
            tokens = ports.tokenizer.encode_response(responses[turn.number])
            span = TokenSpan.of(tokens, [-1.0] * len(tokens), [0] * len(tokens))
            return VersionedGeneration(Generation("", span, StopReason.STOP), 0)

        async def keep(_: PlayedEpisode) -> bool:
            return True

        async def score(_: ScoreRequest) -> Score:
            raise AssertionError("the environment computes the reward")

        async def run() -> tuple[Trajectory, ...]:
            episode = PlayedEpisode(prompt, 10_000, ask, keep, score, ports=ports)
            await episode.play(self.environment)
            return episode.trajectories(Score(1.0))

        return self._runner.run(run())

    def close(self) -> None:
        self._runner.run(self.environment.close())
        self._runner.close()
        for encoder in self.encoders.values():
            encoder.close()


@pytest.fixture(scope="module", params=[*CONFIGS])
def world(request: pytest.FixtureRequest, tokenizers: Mapping[str, PolicyTokenizer]) -> Iterator[tuple[str, World]]:
    created = World(request.param, tokenizers)
    yield request.param, created
    created.close()


def open_prompt(tokenizer: PolicyTokenizer) -> Prompt:
    found = build_prompt(tokenizer)
    return Prompt(found.id, 0, DOMAIN, QUESTION, found.input, ROW, messages=found.messages)


def show(encode: DemonstratedEpisodes, prompt: Prompt, *said: str) -> list[Demonstration]:
    turns = tuple(DemonstratedTurn(one, ends=True) for one in said)
    return encode(prompt, Question(QUESTION, "", ROW, turns=turns))


@settings(max_examples=16, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), name=st.sampled_from([*TEMPLATES]))
def test_demonstration_has_the_tokens_of_its_episode(
    world: tuple[str, World], tokenizers: Mapping[str, PolicyTokenizer], data: st.DataObject, name: str
) -> None:
    kind, created = world
    tokenizer = tokenizers[name]
    drawn = data.draw(st.lists(st.tuples(THOUGHT, st.sampled_from(ACTIONS[kind])), min_size=1, max_size=2))
    said, is_chat = ["".join(one) for one in drawn], tokenizer.has_template
    ports = EnvironmentPorts(tokenizer, PolicyRenderer(tokenizer, {DOMAIN} if is_chat else set()))
    ends = "" if kind == "trl" and not is_chat else END  # without a chat template, the call ends the turn
    prompt = open_prompt(tokenizer)
    played = created.play(ports, prompt, [one + ends for one in said])
    found = list_tokens(show(created.encoders[name], prompt, *said))
    assert found == [([*one.tokens], [*one.loss_mask]) for one in played]
    thoughts = sum(bool(thought) for thought, _ in drawn[:-1])  # no turn follows the last thought
    assert len(found) == (1 + thoughts if name == "removes thoughts" else 1)
    whole = tokenizer.decode(found[0][0])
    assert ("Begin at 0." in whole and '"number"' in whole) if kind == "trl" else "\n0\n" in whole
    sampled = [token for tokens, mask in found for token, mine in zip(tokens, mask, strict=True) if mine]
    assert tokenizer.decode(sampled) == "".join(one + ends for one in said)


def test_demonstration_ended_by_its_environment_is_refused(
    tokenizers: Mapping[str, PolicyTokenizer],
) -> None:
    encode, prompt = encoder_of(gym(), tokenizers["plain text"]), open_prompt(tokenizers["plain text"])
    try:
        with pytest.raises(
            ConfigError, match=r"ends after 3 of 4 turns \(the environment ended the episode\); correct"
        ):
            show(encode, prompt, "1", "1", "1", "1")
    finally:
        encode.close()


def test_environment_that_fails_in_a_demonstration_is_reported(tokenizers: Mapping[str, PolicyTokenizer]) -> None:
    config = gym(options={"wrong": "error"})
    encode, prompt = encoder_of(config, tokenizers["plain text"]), open_prompt(tokenizers["plain text"])
    try:
        with pytest.raises(ConfigError, match="RuntimeError: broken world"):
            show(encode, prompt, "1", "1")
    finally:
        encode.close()


def test_demonstrations_leave_no_process(tokenizers: Mapping[str, PolicyTokenizer]) -> None:
    encode, prompt = encoder_of(trl("Counter"), tokenizers["plain text"]), open_prompt(tokenizers["plain text"])
    show(encode, prompt, "Done.")
    assert encode._thread is not None
    environment = encode._thread.environment
    assert isinstance(environment, ForeignEpisodes)
    mark = find_mark(environment)
    assert list_marked(mark)
    encode.close()
    assert list_marked(mark) == []
