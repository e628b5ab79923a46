"""Helpers of the tests of environments in worker processes: configs, and episodes with a policy of fixed responses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import Prompt
from rollflow.tasks.engines.base import Generation
from rollflow.tasks.environments import build_environment
from rollflow.tasks.environments.config import GymnasiumEnvironment, TrlEnvironment
from rollflow.tasks.environments.foreign.guest_process import list_marked
from rollflow.tasks.environments.foreign.play import ForeignEpisodes
from rollflow.tasks.scorers.base import Score
from rollflow.testing.environments import ScriptedEpisode, build_ports

GUESTS = Path(__file__).parent / "guests"
PROMPT = Prompt("p", 0, "test", "Count.", ModelInput.of(map(ord, "Count.")), {"answer": "3"})
LONG = 100_000  # room of an episode in tokens


def trl(name: str, **keys: Any) -> TrlEnvironment:
    """Return the config of an environment class of the tests."""
    module = keys.pop("module", "odd_worlds")
    return TrlEnvironment(path=f"{module}:{name}", folder=str(GUESTS), **keys)


def gym(name: str = "Walk", **keys: Any) -> GymnasiumEnvironment:
    """Return the config of an environment class of the tests with gymnasium's signature."""
    return GymnasiumEnvironment(path=f"odd_worlds:{name}", folder=str(GUESTS), **keys)


@dataclass
class SpokenEpisode(ScriptedEpisode):
    """An episode whose policy gives fixed responses in turn, and then repeats the last one."""

    responses: Sequence[str] = ("",)
    heard: list[str] = field(default_factory=list)  # texts that the environment has added

    async def generate(self, stop: Sequence[str] = (), max_tokens: int | None = None) -> Generation | None:
        turn = self.asked.count("generate")
        self.said = self.responses[min(turn, len(self.responses) - 1)] or "\n"  # a generation has a token
        return await super().generate(stop, max_tokens)

    def add(self, tokens: Sequence[int]) -> None:
        super().add(tokens)
        self.heard.append("".join(map(chr, tokens)))


def build(config: TrlEnvironment | GymnasiumEnvironment) -> ForeignEpisodes:
    """Build the environment of a config."""
    environment = build_environment(config)
    assert isinstance(environment, ForeignEpisodes)
    return environment


def speak(config: Any, *responses: str, **keys: Any) -> SpokenEpisode:
    """Return an episode in which the policy gives these responses."""
    keys = {"prompt": PROMPT, "longest": LONG, **keys}
    return SpokenEpisode(build_ports(config), responses=responses or ("",), **keys)


def play(config: Any, *responses: str, **keys: Any) -> tuple[Score | None, SpokenEpisode, ForeignEpisodes]:
    """Play one episode, and check that no process outlives the environment."""
    environment, episode = build(config), speak(config, *responses, **keys)

    async def run() -> Score | None:
        try:
            return await environment.play(episode)
        finally:
            await close(environment)

    return asyncio.run(run()), episode, environment


async def close(environment: ForeignEpisodes) -> None:
    """Close an environment, and check that none of its processes is left."""
    mark = find_mark(environment)
    await environment.close()
    if mark:
        assert list_marked(mark) == []


def find_mark(environment: ForeignEpisodes) -> str:
    """Return the mark of the processes of an environment; "" if there are none."""
    pool = environment._pool
    return pool._guest.mark if pool and pool._guest else ""


def call(name: str, **arguments: Any) -> str:
    """Return a response that calls a tool."""
    import json

    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
