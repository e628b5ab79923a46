"""Plays episodes in a class that TRL's `environment_factory` takes.

    prompt + tools + reset's text --> ( generate --> tool calls --> results )* --> get_reward, or the run's scorer

The policy calls tools as `calls` describes. The episode ends with the first response without a call, or at a limit.
"""

from __future__ import annotations

from rollflow.tasks.environments.base import Episode, charge_unparsable
from rollflow.tasks.environments.foreign.calls import END, ToolCall, describe_result, parse_calls
from rollflow.tasks.environments.foreign.faults import CallFailed
from rollflow.tasks.environments.foreign.opening import open_prompt
from rollflow.tasks.environments.foreign.play import FinalAnswer, ForeignEpisodes, Progress
from rollflow.tasks.environments.foreign.snapshots import restore_world, save_snapshot
from rollflow.tasks.environments.foreign.world import World
from rollflow.tasks.scorers.base import Score


class TrlEpisodes(ForeignEpisodes):
    """Plays the episodes of a TRL environment. See the module's docstring."""

    async def _play(self, episode: Episode, world: World, progress: Progress) -> Score | FinalAnswer | None:
        described, text = await self._begin(episode, world)
        if await restore_world(episode, world) is None:
            open_prompt(episode, described.get("tools") or (), text or "")
        # a policy without chat template has not learned to end its turn after a call
        stop = () if episode.ports.renderer.is_chat(episode.prompt) else (END,)
        made = None
        while not episode.limit:
            made = await episode.generate(stop=stop)
            if made is None:
                return None
            world.begin_turn()
            calls = parse_calls(episode.ports.tokenizer.decode_response(made.tokens))
            if not calls:
                break
            if any(call.fault for call in calls):
                charge_unparsable(episode)
            keys = (f"{episode.turn_id}.{number}" if episode.turn_id else "" for number in range(len(calls)))
            results = [await self._call(world, call, key) for call, key in zip(calls, keys, strict=True)]
            if episode.limit or not self._add_results(episode, results):
                break
            await save_snapshot(episode, world, progress.total)
        assert made is not None
        if not described.get("has_reward"):
            return FinalAnswer(made.tokens)
        try:
            return self._validate(Score(await world.reward()))
        except CallFailed as failed:
            return self._score_error(failed, progress)

    async def _call(self, world: World, call: ToolCall, key: str) -> str:
        """Return the result of a tool call, or why it failed, as the policy reads it."""
        if call.fault:
            return f"error: {call.fault}"
        try:
            return await world.call(call.name, call.arguments, key)
        except CallFailed as failed:
            return f"error: {failed}"

    def _add_results(self, episode: Episode, results: list[str]) -> bool:
        return self._add_messages(episode, "tool", results, describe_result)
