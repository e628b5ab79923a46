"""Plays episodes in which the policy calls tools, as `tool_calls` describes, and then answers.

    prompt + tools --> ( generate --> tool calls --> results )* --> answer --> the run's scorer

The first response without a call is the answer. An episode without an answer gets the reward 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rollflow.storage.records import Outcome
from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.environments.foreign.faults import CallFailed, WorldEnded, score_fault
from rollflow.tasks.environments.foreign.health import EnvironmentHealth
from rollflow.tasks.environments.foreign.opening import open_prompt
from rollflow.tasks.environments.foreign.pool import MakePool, WorldPool
from rollflow.tasks.environments.tool_calls import (
    END,
    LONGEST_NAME,
    RESULT_FRAME,
    Action,
    ActionCall,
    perform_calls,
)
from rollflow.tasks.environments.tool_use.config import ToolsEnvironment
from rollflow.tasks.environments.tool_use.offered import OfferedTool, make_readable
from rollflow.tasks.environments.tool_use.places import ToolPlaces
from rollflow.tasks.scorers.base import Score, make_storable

NO_ROOM = Score(0.0, "the results of the tools left no room for an answer", Outcome.WRONG)


class ToolEpisodes(Environment):
    """Plays the episodes of the environment `tools`."""

    def __init__(self, config: ToolsEnvironment, make_pool: MakePool = WorldPool) -> None:
        self._config, self._make_pool = config, make_pool
        self.health = EnvironmentHealth(f'kind = "{config.kind}"', config.max_failures, config.kind)
        self._name = f"environment {config.kind}"
        self._places: ToolPlaces | None = None

    async def play(self, episode: Episode) -> Score | None:
        """Run an episode, as `Environment.play` specifies.

        Raises:
            ConfigError: too many episodes in a row failed for reasons that the policy cannot have caused.
        """
        try:
            async with self._find_places().open() as tools:
                schemas = [tool.schema for tool in tools.values()]
                answer = await converse(episode, schemas, partial(self._act, tools))
        except WorldEnded as ended:
            return score_fault(self._name, 0.0, str(ended), ended.outcome)
        if answer is None or isinstance(answer, Score):
            return answer
        self.health.count_success()
        # The answer is scored after the tools are closed, so that a slow judge delays no waiting episode.
        return await episode.judge(answer)

    async def close(self) -> None:
        """End all processes and sandboxes that the tools have started."""
        if self._places is not None:
            await self._places.close()

    async def _act(self, tools: Mapping[str, OfferedTool], action: Action) -> list[str]:
        """Execute the tool calls of a turn in order, and return the texts that the policy reads."""
        return await perform_calls(action, partial(self._call, tools))

    async def _call(self, tools: Mapping[str, OfferedTool], _number: int, call: ActionCall) -> str:
        """Call a tool, and return its result, or the reason why the call failed."""
        tool = tools.get(call.name)
        if tool is None:
            text = f"error: there is no tool {call.name[:LONGEST_NAME]!r}; the tools are {', '.join(tools)}"
            return make_storable(text, len(text))
        try:
            text = await tool.call(call.arguments)
        except CallFailed as failed:
            text = f"error: {failed}"
        return make_readable(text, self._config.result_characters)

    def _find_places(self) -> ToolPlaces:
        """Return the `ToolPlaces` of the running event loop; create them if there are none."""
        if self._places is None or self._places.loop is not asyncio.get_running_loop():
            self._places = ToolPlaces(self._config, self.health, self._make_pool)
        return self._places


async def converse(
    episode: Episode, schemas: Sequence[Mapping[str, Any]], act: Callable[[Action], Awaitable[Sequence[str]]]
) -> Sequence[int] | Score | None:
    """Let the policy call tools until it answers without a call; return the tokens of the answer. The result is None if
    the episode is unwanted or has reached a limit.

    `schemas` are the schemas of the tools. `act` executes the calls of a turn, and returns the texts that the policy
    reads.
    """
    await open_prompt(episode, schemas, "")
    # Without a chat template, a stop string ends the turn after a tool call.
    stop = () if episode.ports.renderer.is_chat(episode.prompt) else (END,)
    while (made := await episode.generate(stop=stop)) is not None:
        action = episode.read_action(made.tokens)
        if not action.calls and not action.fault:
            return made.tokens
        results = await act(action)
        messages = [{"role": "tool", "content": one, "frame": RESULT_FRAME} for one in results]
        if not await episode.extend_apart(messages):
            return NO_ROOM
    return None
