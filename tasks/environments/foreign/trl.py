"""Plays episodes with an environment class that follows the contract of TRL's `environment_factory`.

    prompt + tools + reset's text --> ( generate --> tool calls --> results )* --> get_reward, or the run's scorer

The module `tool_calls` describes how the policy calls tools. The first response without a call, or a limit, ends the
episode.
"""

from __future__ import annotations

import functools

from rollflow.tasks.environments.base import Episode
from rollflow.tasks.environments.foreign.faults import CallFailed
from rollflow.tasks.environments.foreign.opening import open_prompt
from rollflow.tasks.environments.foreign.play import FinalAnswer, ForeignEpisodes, Progress
from rollflow.tasks.environments.foreign.snapshots import restore_world, save_snapshot
from rollflow.tasks.environments.foreign.world import World
from rollflow.tasks.environments.tool_calls import END, RESULT_FRAME, ActionCall, perform_calls
from rollflow.tasks.scorers.base import Score


class TrlEpisodes(ForeignEpisodes):
    """Plays the episodes of a TRL environment."""

    async def _play(self, episode: Episode, world: World, progress: Progress) -> Score | FinalAnswer | None:
        described, text = await self._begin(episode, world)
        if await restore_world(episode, world) is None:
            await open_prompt(episode, described.get("tools") or (), text or "")
        # Without a chat template, a stop string ends the turn after a tool call.
        stop = () if episode.ports.renderer.is_chat(episode.prompt) else (END,)
        made = None
        while not episode.limit:
            made = await episode.generate(stop=stop)
            if made is None:
                return None
            world.begin_turn()
            action = episode.read_action(made.tokens)
            if not action.calls and not action.fault:
                break
            results = await perform_calls(action, functools.partial(self._call, world, episode.turn_id))
            if episode.limit or not await self._add_results(episode, results):
                break
            await save_snapshot(episode, world, progress.total)
        assert made is not None
        if not described.get("has_reward"):
            return FinalAnswer(made.tokens)
        try:
            return self._validate(Score(await world.reward()))
        except CallFailed as failed:
            return self._score_error(failed, progress)

    async def _call(self, world: World, turn_id: str, number: int, call: ActionCall) -> str:
        """Call a tool, and return the text that the policy reads: the result, or the reason why the call failed."""
        try:
            return await world.call(call.name, call.arguments, f"{turn_id}.{number}" if turn_id else "")
        except CallFailed as failed:
            return f"error: {failed}"

    async def _add_results(self, episode: Episode, results: list[str]) -> bool:
        return await self._add_messages(episode, "tool", results, RESULT_FRAME)
