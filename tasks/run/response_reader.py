"""Decodes the tokens of stored responses into the texts that the responses' scorers read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rollflow.storage.errors import ConfigError, Corrupt
from rollflow.storage.records import Trajectory
from rollflow.tasks.prompts.run_prompts import RunPrompts
from rollflow.tasks.run.context import RunContext


@dataclass
class ResponseReader:
    """Reads the responses of a run. The prompts of the run are opened only if some of its scorers read special tokens
    and others do not.
    """

    context: RunContext

    def read(self, prompt: int, trajectory: Trajectory) -> str:
        """Return the text of a response to a prompt, with or without special tokens, as the prompt's scorer reads
        it.
        """
        chosen = [token for token, own in zip(trajectory.tokens, trajectory.loss_mask, strict=True) if own]
        return self.context.tokenizer.decode_response(chosen, self._reads_special_tokens(prompt))

    def _reads_special_tokens(self, prompt: int) -> bool:
        scorers = self.context.config.scorers
        choices = {reward.special_tokens for reward in scorers.values()}
        if len(choices) == 1:
            return choices.pop()
        name = self._prompts.prompt(prompt).scorer if self._prompts else ""
        return scorers.get(name, self.context.config.reward).special_tokens

    @cached_property
    def _prompts(self) -> RunPrompts | None:
        """The run's prompts, or None if they have changed since the run began."""
        try:
            return self.context.prompts()
        except (ConfigError, Corrupt):
            return None
