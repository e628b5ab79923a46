"""Plays episodes of a recipe with a player: the recipe's environment asks, the player answers, the scorer scores."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rollflow.flows.commands.play.players import Player
from rollflow.flows.commands.play.screen import Screen
from rollflow.flows.commands.play.transcript import USER, NotedRenderer, Transcript
from rollflow.flows.policies.asked_recipe import AskedRecipe
from rollflow.storage.errors import Unreachable
from rollflow.storage.records import Prompt, StopReason
from rollflow.tasks.environments.foreign.frames import FrameTaker
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.rollout.episode import PlayedEpisode, Turn
from rollflow.tasks.rollout.judging import Judge
from rollflow.tasks.rollout.proxy import VersionedGeneration
from rollflow.tasks.scorers.base import Score

SPEAKERS = {USER: "environment", "assistant": "policy"}
ENDINGS = {StopReason.LENGTH: "cut at the limit"}


@dataclass
class Game:
    """Plays one episode after another. `scores` contains the scores of all ended episodes; `is_over` is True once the
    player has left.
    """

    recipe: AskedRecipe
    tokenizer: PolicyTokenizer
    player: Player
    judge: Judge
    screen: Screen
    scores: list[Score] = field(default_factory=list)
    is_over: bool = False
    _taker: FrameTaker = field(default_factory=lambda: FrameTaker(is_replay=False))

    async def play(self, number: int, episodes: int | None, prompt: Prompt) -> None:
        """Play an episode from its prompt to its score, and show it; if the player leaves, the episode has no score.

        Raises:
            Unreachable: the episode of a player that is not a person took longer than `rollout.patience_seconds`.
        """
        self.screen.begin(number, episodes, f"{prompt.domain}, prompt {prompt.index}")
        self._show_prompt(prompt)
        self._taker.attach(self.recipe.environment, prompt)
        renderer = NotedRenderer(self.recipe.ports.renderer)
        conversation = Transcript(prompt, self.tokenizer, renderer)
        episode = PlayedEpisode(
            prompt,
            self.recipe.config.engine.max_new_tokens,
            lambda turn: self._ask(number, turn, conversation),
            self._keep,
            self.judge,
            self.recipe.vocabulary,
            replace(self.recipe.ports, renderer=renderer),
        )
        patience = None if self.player.is_person else self.recipe.config.rollout.patience_seconds
        try:
            async with asyncio.timeout(patience):
                score = await episode.play(self.recipe.environment)
        except TimeoutError:
            raise Unreachable(
                f"episode {number} did not end within rollout.patience_seconds = {patience:g}; raise this key if "
                "the episode needs more time"
            ) from None
        if score is None:
            return
        self._show_messages(conversation.read_context(episode.prompt.input.flat + episode.response))
        score = episode.find_unjudged(score) or score
        self.scores.append(score)
        self.screen.score(score)

    async def _ask(self, number: int, turn: Turn, conversation: Transcript) -> VersionedGeneration | None:
        """Show what the environment said, and let the player answer; return None if the player has left."""
        messages = conversation.read_context(turn.prompt.flat)
        if conversation.is_rewritten:
            self.screen.note("the environment has rewritten the context, which is now:")
        self._show_messages(messages)
        notes = [f"turn {turn.number + 1}"]
        if self.player.is_person:
            limit = [f"up to {turn.max_new_tokens} tokens"]
            stops = [f"ends at {' or '.join(map(repr, turn.stop))}"] if turn.stop else []
            self.screen.head(self.player.name, [*notes, *limit, *stops])
        try:
            found = await self.player.answer(number, turn, conversation)
        except EOFError:
            self.is_over = True
            return None
        text = conversation.note_answer(found.generation.tokens)
        if not self.player.is_person:
            ending = ENDINGS.get(found.generation.ending)
            count = len(found.generation.tokens)
            tokens = f"{count} token{'s' * (count != 1)}"
            self.screen.say(self.player.name, text, [*notes, tokens, *([ending] if ending else [])])
        return found

    def _show_prompt(self, prompt: Prompt) -> None:
        for message in prompt.messages or [{"role": USER, "content": prompt.text}]:
            speaker = "prompt" if message["role"] == USER else message["role"]
            self.screen.say(SPEAKERS.get(speaker, speaker), message["content"])

    def _show_messages(self, messages: Sequence[Mapping[str, str]]) -> None:
        """Show what the environment has said, and the text that it renders if the messages do not contain it."""
        for message in messages:
            self.screen.say(SPEAKERS.get(message["role"], message["role"]), message["content"])
        said = "".join(message["content"] for message in messages)
        for frame in self._taker.take_new():
            if frame.text.strip() not in said:
                self.screen.say("frame", frame.text)

    async def _keep(self, _: PlayedEpisode) -> bool:
        """Return True if the episode is scored, and False if the player has left."""
        return not self.is_over
