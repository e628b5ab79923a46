"""The contract of environments: an environment runs an episode from its prompt to its reward, or to none.

    prompt --> ( generate --> add )* --> judge, or a score computed by the environment

- The environment asks its episode for generations. It never sees engines, versions or seeds.
- Tokens added by the environment are appended to the response. They are not the policy's, so they are not trained on.
- An episode may end at any time, because it is no longer wanted. Then `generate` and `judge` return None, and the
  environment returns; if it awaits something else, that is cancelled. It need not clean up the episode: the generated
  tokens are counted.
- After a crash an episode is played again with the same seeds, so an environment keeps no state between episodes.

Environments run in the scheduler's event loop, thousands at a time: they must await and never block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rollflow.storage.records import Prompt
from rollflow.tasks.engines.base import Generation
from rollflow.tasks.verifiers.base import Score


class Episode(Protocol):
    """One response in progress, as its environment sees it."""

    @property
    def prompt(self) -> Prompt:
        """The prompt of the episode."""

    @property
    def response(self) -> Sequence[int]:
        """The tokens after the prompt: those of the policy and those that were added."""

    @property
    def room(self) -> int:
        """Number of tokens that the response may still get."""

    async def generate(self) -> Generation | None:
        """Let the policy continue the response; None if the episode is over or the response has no room left.

        Raises:
            EngineFailed: no engine was left for the request, `rollout.attempts` times.
        """

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens that the policy did not choose; at most `room` of them."""

    async def judge(self, tokens: Sequence[int]) -> Score | None:
        """Score these tokens with the run's verifier; nothing is generated after that. None if it is not wanted."""


class Environment(Protocol):
    """Runs the episodes of a run; one object for all of them. See the module's docstring."""

    async def play(self, episode: Episode) -> Score | None:
        """Run an episode from prompt to reward. None means no reward, which counts as 0 if the episode is wanted."""
