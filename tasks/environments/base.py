"""The contract of environments, which run an episode from its prompt to its reward.

    prompt --> ( generate --> add )* --> judge, or a score computed by the environment

- An environment requests generations from its episode, each with its own stop strings and token limit. An environment
  never sees engines, versions or seeds.
- The run gives an environment its tokenizer, renderer, tools and clock as `Episode.ports`, and its scorer as
  `Episode.judge` and `Episode.score`.
- Tokens added by the environment are appended to the response. Added tokens do not come from the policy, so the policy
  is not trained on them.
- An episode may end at any time, because it is no longer wanted. Once an episode is no longer wanted, `generate` and
  `judge` return None, and the environment must return. If the environment awaits something else, its task is cancelled.
  The environment need not clean up the episode: the generated tokens are counted in any case.
- After a crash an episode is played again with the same seeds, so an environment keeps no state between episodes.

Environments run in the scheduler's event loop, thousands at a time: an environment must await and never block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rollflow.storage.records import Prompt
from rollflow.tasks.engines.base import Generation
from rollflow.tasks.environments.ports import EnvironmentPorts
from rollflow.tasks.scorers.base import Score


class Episode(Protocol):
    """One response in progress, through which an environment generates tokens and has them scored."""

    @property
    def prompt(self) -> Prompt:
        """The prompt of the episode."""

    @property
    def response(self) -> Sequence[int]:
        """All tokens after the prompt, both those from the policy and those that the environment added."""

    @property
    def room(self) -> int:
        """Number of tokens by which the response may still grow."""

    @property
    def ports(self) -> EnvironmentPorts:
        """Tokenizer, renderer, tools and clock for the environment."""

    async def generate(self, stop: Sequence[str] = (), max_tokens: int | None = None) -> Generation | None:
        """Let the policy continue the response; return None if the episode is over or the response has no room left.

        Args:
            stop: strings that end the generation; such a string stays in the response. max_tokens: largest number of
            tokens to generate; the default is `room`.

        Raises:
            EngineFailed: the request failed `rollout.attempts` times because no engine was left.
        """

    def add(self, tokens: Sequence[int]) -> None:
        """Append at most `room` tokens that the policy did not generate and is not trained on."""

    async def judge(self, tokens: Sequence[int]) -> Score | None:
        """End generation and score these tokens with the prompt's scorer; return None if the episode is not wanted.

        After a call of `judge` the policy generates no more tokens for the episode.
        """

    async def score(self, tokens: Sequence[int], reference: Mapping[str, Any] | None = None) -> Score:
        """Score these tokens with the prompt's scorer, without ending the episode.

        `reference` replaces the prompt's own reference answer, if given.
        """


class Environment(Protocol):
    """Runs episodes; a single environment object runs all episodes of a run. See the module's docstring."""

    async def play(self, episode: Episode) -> Score | float | None:
        """Run an episode and return its score, or only the score's value, or None for no reward.

        If an episode that is wanted gets no reward, its reward is 0.
        """
