"""Tests that messages extend an episode by tokens, or begin a branch if the chat template changes earlier answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import Prompt, StopReason, Trajectory
from rollflow.tasks.engines.base import Generation, TokenSpan
from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.environments.long_text import LONG
from rollflow.tasks.environments.ports import EnvironmentPorts, Message
from rollflow.tasks.policies.renderer import PolicyRenderer
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.rollout.episode import PlayedEpisode, Turn
from rollflow.tasks.rollout.proxy import VersionedGeneration
from rollflow.tasks.scorers.base import Score, ScoreRequest
from tests.support.policy_folders import CHAT, END, OVER, make_tokenizer
from tests.tasks.test_token_truth import TEMPLATE

QUESTION = [{"role": "user", "content": "1+1="}]
THOUGHT = "<think>\nHm.\n</think>\n\n2"
BEGINS = CHAT.replace("<|turn|>assistant\n{% endif %}", "<|turn|>assistant\n<think>\n{% endif %}")


class Asking(Environment):
    """An environment that adds a message of the next given role after each answer, and records whether the message
    fits.
    """

    def __init__(self, roles: list[str]) -> None:
        self.roles, self.fits = roles, list[bool]()

    async def play(self, episode: Episode) -> Score | None:
        for number, role in enumerate(self.roles):
            await episode.generate()
            self.fits.append(episode.extend([{"role": role, "content": f"seen {number}"}]))
        await episode.generate()
        return Score(1.0)


def open_policy(folder: Path, template: str) -> PolicyTokenizer:
    folder.mkdir()
    make_tokenizer(folder, template=template)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": END, "max_position_embeddings": 512}))
    return PolicyTokenizer(folder, 0.0)


def play(
    tokenizer: PolicyTokenizer,
    environment: Environment,
    said: str,
    longest: int = 400,
    renderer: PolicyRenderer | None = None,
) -> list[Trajectory]:
    prompt = Prompt("p", 0, "chat", "", ModelInput.of(tokenizer.encode(QUESTION, chat=True)), messages=QUESTION)

    async def ask(turn: Turn) -> VersionedGeneration:
        tokens = [*tokenizer.encode_response(said), OVER]
        span = TokenSpan.of(tokens, [-1.0] * len(tokens), [0] * len(tokens))
        return VersionedGeneration(Generation("", span, StopReason.STOP), 0)

    async def keep(_: PlayedEpisode) -> bool:
        return True

    async def score(_: ScoreRequest) -> Score:
        return Score(1.0)

    async def run() -> list[Trajectory]:
        ports = EnvironmentPorts(tokenizer, renderer or PolicyRenderer(tokenizer, {"chat"}))
        episode = PlayedEpisode(prompt, longest, ask, keep, score, ports=ports)
        found = await episode.play(environment)
        assert found is not None
        return list(episode.trajectories(found))

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("template", "said", "roles", "branches"),
    [
        (CHAT, THOUGHT, ["user", "user"], 1),  # the template keeps thoughts
        (TEMPLATE, THOUGHT, ["tool", "tool"], 1),  # thoughts stay between tool calls
        (TEMPLATE, "2", ["user", "user"], 1),  # no thought, so nothing changes
        (TEMPLATE, THOUGHT, ["user", "user"], 3),
        (TEMPLATE, THOUGHT, ["tool", "user", "tool"], 2),
        (BEGINS, "2", ["user"], 1),  # the thought that the prompt begins cannot be removed
    ],
)
def test_branch_begins_where_the_template_changes_an_answer(
    tmp_path: Path, template: str, said: str, roles: list[str], branches: int
) -> None:
    """Without a branch, or in the last branch, the context is what the template writes for the whole conversation."""
    tokenizer = open_policy(tmp_path / "policy", template)
    environment = Asking(roles)
    found = play(tokenizer, environment, said)
    assert (len(found), environment.fits) == (branches, [True] * len(roles))
    if template is BEGINS:
        return
    messages = list(QUESTION)
    for number, role in enumerate(roles):
        messages += [{"role": "assistant", "content": said}, {"role": role, "content": f"seen {number}"}]
    assert found[-1].turn_starts is not None
    before = found[-1].tokens[: found[-1].turn_starts[-1]]
    assert tokenizer.decode(list(before)) == tokenizer.template.render_messages(messages)


def test_messages_too_long_for_the_episode_are_not_added(tmp_path: Path) -> None:
    tokenizer = open_policy(tmp_path / "policy", TEMPLATE)
    length = len(tokenizer.encode_response(THOUGHT)) + 1
    environment = Asking(["user"])
    [one] = play(tokenizer, environment, THOUGHT, longest=length + 3)
    assert environment.fits == [False]
    assert one.response_tokens >= length


def test_messages_before_the_first_answer_are_refused(tmp_path: Path) -> None:
    class Early(Environment):
        async def play(self, episode: Episode) -> Score | None:
            episode.extend(QUESTION)
            return None

    with pytest.raises(ValueError, match="the policy has not answered yet"):
        play(open_policy(tmp_path / "policy", CHAT), Early(), "2")


class NotedThreads(PolicyRenderer):
    """A renderer that notes in which thread it renders."""

    def __init__(self, tokenizer: PolicyTokenizer) -> None:
        super().__init__(tokenizer, {"chat"})
        self.threads = list[bool]()  # True: the thread of the event loop

    def render(self, prompt: Prompt, response: Sequence[int], messages: Sequence[Message]) -> Sequence[int]:
        self.threads.append(threading.current_thread() is threading.main_thread())
        return super().render(prompt, response, messages)


@pytest.mark.parametrize("length", [1, LONG - 1, LONG, 10 * LONG])
def test_long_messages_are_tokenized_in_a_thread(tmp_path: Path, length: int) -> None:
    class Long(Environment):
        async def play(self, episode: Episode) -> Score | None:
            for extended in (episode.extend_apart, episode.extend):
                await episode.generate()
                found = extended([{"role": "tool", "content": "y" * length}])
                assert (found if isinstance(found, bool) else await found) is True
            await episode.generate()
            return Score(1.0)

    tokenizer = open_policy(tmp_path / "policy", CHAT)
    renderer = NotedThreads(tokenizer)
    [one] = play(tokenizer, Long(), "2", longest=10**6, renderer=renderer)
    assert renderer.threads == [length < LONG, True]
    first, second, third = one.turn_starts or ()
    assert one.tokens[first:second] == one.tokens[second:third]  # the tokens are the same with and without a thread
