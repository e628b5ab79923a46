"""Plays episodes in an environment with the methods of a gymnasium environment.

    prompt + first observation --> ( generate --> action --> step --> observation )* --> the sum of the rewards

With `rewards = "turns"`, each turn gets the reward of its step, and the score is 0. In both cases, the outcome (correct
or not) follows from the sum of all rewards, so accuracy does not depend on the key `rewards`.

After a response that names no action, the policy reads the reason, and the turn counts toward `max_turns`.
"""

from __future__ import annotations

from rollflow.storage.records import Outcome
from rollflow.tasks.environments.base import Episode, charge_unparsable
from rollflow.tasks.environments.foreign.config import GymnasiumEnvironment
from rollflow.tasks.environments.foreign.faults import CallFailed, WorldEnded
from rollflow.tasks.environments.foreign.opening import open_prompt
from rollflow.tasks.environments.foreign.play import FinalAnswer, ForeignEpisodes, Progress
from rollflow.tasks.environments.foreign.snapshots import restore_world, save_snapshot
from rollflow.tasks.environments.foreign.world import World
from rollflow.tasks.scorers.base import LARGEST, Score, outcome_of

VIEW_FRAME = "\n{}\n"  # text around an observation, for a policy without chat template


class GymnasiumEpisodes(ForeignEpisodes):
    """Plays the episodes of a gymnasium environment."""

    _config: GymnasiumEnvironment

    async def _play(self, episode: Episode, world: World, progress: Progress) -> Score | FinalAnswer | None:
        _, text = await self._begin(episode, world)
        if (total := await restore_world(episode, world)) is None:
            episode.enter_state(text or "")
            await open_prompt(episode, (), VIEW_FRAME.replace("{}", text or ""))
        else:
            progress.total = total
        try:
            while not (reason := episode.limit):
                made = await episode.generate()
                if made is None:
                    return None
                world.begin_turn()
                said = episode.ports.tokenizer.decode_response(made.tokens)
                if (seen := await self._step(episode, world, said, progress)) is None:
                    reason = "the environment ended the episode"
                    break
                if not episode.limit and not await self._add_messages(episode, "user", [seen], VIEW_FRAME):
                    reason = "there was no room for another turn"
                    break
                await save_snapshot(episode, world, progress.total)
        except CallFailed as failed:
            return self._score_error(failed, progress)
        await world.close()
        return self._validate(Score(progress.total, reason, outcome_of(progress.earned)))

    async def _step(self, episode: Episode, world: World, said: str, progress: Progress) -> str | None:
        """Perform the action that a response names, and return the next text for the policy; None if the episode has
        ended."""
        answer = await world.step(said, episode.turn_id)
        if "invalid" in answer:
            charge_unparsable(episode)
            return f"error: {answer['invalid']}"
        reward, text = answer.get("reward"), answer.get("text")
        if not isinstance(reward, int | float) or not isinstance(text, str):
            raise WorldEnded(Outcome.KILLED, "the environment's process wrote no valid answer to step")
        if not abs(reward) <= LARGEST:
            raise CallFailed(f"the reward of a step is {reward}, which is not a finite number")
        episode.enter_state(text)
        progress.earned += reward
        if self._config.rewards == "turns":
            episode.reward(reward)
        else:
            progress.total += reward
        return None if answer.get("ended") else text
