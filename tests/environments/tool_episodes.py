"""Helpers of the tests of the environment `tools`: episodes with fixed responses, and records of the judged texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from rollflow.storage.records import Outcome, StopReason, Trajectory
from rollflow.tasks.engines.base import Generation, TokenSpan
from rollflow.tasks.environments import build_environment
from rollflow.tasks.environments.config import ToolsEnvironment
from rollflow.tasks.environments.ports import EnvironmentPorts
from rollflow.tasks.environments.tool_use.config import PythonTool
from rollflow.tasks.environments.tool_use.play import ToolEpisodes
from rollflow.tasks.rollout.episode import PlayedEpisode, Turn
from rollflow.tasks.rollout.proxy import VersionedGeneration
from rollflow.tasks.sandboxes.base import Sandboxes
from rollflow.tasks.sandboxes.config import MIB, BubblewrapSandbox
from rollflow.tasks.scorers.base import Score, ScoreRequest
from rollflow.testing.environments import build_ports
from tests.environments.worlds import LONG, PROMPT, SpokenEpisode, call

SANDBOX = BubblewrapSandbox(
    memory_bytes=128 * MIB, folder_bytes=8 * MIB, folder_files=200, output_bytes=100_000, processes=16, spares=0
)


@dataclass
class JudgedEpisode(SpokenEpisode):
    """An episode that records which text was judged."""

    judged: list[str] = field(default_factory=list)

    async def judge(self, tokens: Sequence[int]) -> Score | None:
        self.judged.append("".join(map(chr, tokens)))
        return await super().judge(tokens)


def python_tool(**keys: Any) -> ToolsEnvironment:
    """Return the config of an environment with the Python tool alone."""
    tool = {"sandbox": SANDBOX, "seconds": keys.pop("seconds", 60.0)}
    return ToolsEnvironment(python=PythonTool(**tool), **keys)


def run_code(code: str) -> str:
    """Return a response that calls the tool python."""
    return call("python", code=code)


def build_tools(config: ToolsEnvironment) -> ToolEpisodes:
    """Build the environment of a config."""
    environment = build_environment(config)
    assert isinstance(environment, ToolEpisodes)
    return environment


def speak_tools(config: ToolsEnvironment, *responses: str, **keys: Any) -> JudgedEpisode:
    """Return an episode in which the policy gives these responses."""
    return JudgedEpisode(build_ports(config), **{"prompt": PROMPT, "longest": LONG, **keys}, responses=responses)


class Tools:
    """An environment with tools, and the event loop that runs it."""

    def __init__(self, config: ToolsEnvironment, loop: Callable[[], asyncio.AbstractEventLoop] | None = None) -> None:
        self.config, self.environment = config, build_tools(config)
        self._runner = asyncio.Runner(loop_factory=loop)

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Wait for a coroutine."""
        return self._runner.run(work)

    async def get_sandboxes(self) -> Sandboxes:
        """Return the started sandboxes of the Python tool."""
        return await self.environment._find_places()._sandboxes.get()

    def play(self, *responses: str, **keys: Any) -> tuple[Score | None, JudgedEpisode]:
        """Play one episode."""
        episode = speak_tools(self.config, *responses, **keys)
        return self.do(self.environment.play(episode)), episode

    def close(self) -> None:
        """End the tools and the loop."""
        self.do(self.environment.close())
        self._runner.close()


def open_tools(**keys: Any) -> Tools:
    """Start an environment with the Python tool; skip the test if this machine has no sandboxes."""
    created = Tools(python_tool(**keys))
    score, _ = created.play(run_code("1"), "Done.")
    if score is not None and score.outcome is Outcome.UNJUDGED:
        created.close()
        pytest.skip(score.reason)
    return created


def play_real(
    tools: Tools, ports: EnvironmentPorts, *responses: str, **keys: Any
) -> tuple[Score, tuple[Trajectory, ...], list[ScoreRequest]]:
    """Play an episode of the class `PlayedEpisode`, and return its score, its trajectories and the requests to the
    scorer.
    """
    judged = list[ScoreRequest]()

    async def ask(turn: Turn) -> VersionedGeneration:
        tokens = list(ports.tokenizer.encode_response(responses[min(turn.number, len(responses) - 1)]))
        span = TokenSpan.of(tokens, [-1.0] * len(tokens), [0] * len(tokens))
        return VersionedGeneration(Generation("", span, StopReason.STOP), 0)

    async def keep(_: PlayedEpisode) -> bool:
        return True

    async def score(request: ScoreRequest) -> Score:
        judged.append(request)
        return Score(1.0, "judged")

    async def run() -> tuple[Score, tuple[Trajectory, ...]]:
        prompt = keys.get("prompt", PROMPT)
        episode = PlayedEpisode(prompt, keys.get("longest", 10_000), ask, keep, score, ports=ports)
        found = await episode.play(tools.environment)
        assert found is not None
        return found, () if episode.first is None else episode.trajectories(found)

    found, trajectories = tools.do(run())
    return found, trajectories, judged
