"""The contract of environments: an environment runs an episode from its prompt to its reward, or to no reward.

    prompt --> ( generate --> add )* --> judge, or a score computed by the environment

- The environment asks its episode for generations, each with stop strings and a token budget of its own. An environment
  never sees engines, versions or seeds.
- The run gives an environment its tokenizer, renderer, tools and clock as `Episode.ports`, and its scorer as
  `Episode.judge` and `Episode.score`.
- Tokens added by the environment are appended to the response. Added tokens do not come from the policy, so the policy
  is not trained on them.
- An episode may end at any time, because it is no longer wanted. Then `generate` and `judge` return None, and the
  environment returns. If the environment awaits something else, its task is cancelled. The environment need not clean
  up the episode: the generated tokens are counted in any case.
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
    """One response in progress, as its environment sees it."""

    @property
    def prompt(self) -> Prompt:
        """The prompt of the episode."""

    @property
    def response(self) -> Sequence[int]:
        """The tokens after the prompt: tokens from the policy and tokens added by the environment."""

    @property
    def room(self) -> int:
        """Number of tokens that the response may still get."""

    @property
    def ports(self) -> EnvironmentPorts:
        """Tokenizer, renderer, tools and clock of the run."""

    async def generate(self, stop: Sequence[str] = (), max_tokens: int | None = None) -> Generation | None:
        """Let the policy continue the response; return None if the episode is over or the response has no room left.

        Args:
            stop: strings that end the generation; the string that ended it stays in the response.
            max_tokens: most tokens of this generation (default: the room of the response).

        Raises:
            EngineFailed: at each of `rollout.attempts` tries no engine was left for the request.
        """

    def add(self, tokens: Sequence[int]) -> None:
        """Append at most `room` tokens that the policy did not choose."""

    async def judge(self, tokens: Sequence[int]) -> Score | None:
        """Score these tokens with the run's scorer; return None if the episode is not wanted.

        After a call of `judge` the policy generates no more tokens for the episode.
        """

    async def score(self, tokens: Sequence[int], reference: Mapping[str, Any] | None = None) -> Score:
        """Score these tokens with the run's scorer, while the episode goes on.

        `reference` replaces the prompt's own reference.
        """


class Environment(Protocol):
    """Runs the episodes of a run; one environment object runs all of them. See the module's docstring."""

    async def play(self, episode: Episode) -> Score | float | None:
        """Run an episode from prompt to reward; return a score, a number as its value, or None for no reward.

        A missing reward counts as 0 if the episode is wanted.
        """
