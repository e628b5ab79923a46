"""What an environment does: it leads an episode from its prompt to its reward, or to none.

    prompt --> ( generate --> add )* --> judge, or a score of the environment's own

- Generation is asked of the episode, which knows engines, versions and seeds: an environment never sees them.
- Tokens that are added stand behind the response so far. They are not the policy's: nothing is trained on them.
- An episode may be over at any time, because nobody wants it any more: then `generate` and `judge` give None, and the
  environment returns; where it awaits something of its own, that is cancelled. It need not clean up after the episode:
  what was generated is counted.
- An episode is played again after a death, with the same seeds: an environment keeps nothing from one to the next.

Environments run in the scheduler's event loop, thousands at a time: they await, and never block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rollflow.storage.records import Prompt
from rollflow.tasks.engines.base import Generation
from rollflow.tasks.verifiers.base import Score


class Episode(Protocol):
    """One response under way, as its environment sees it."""

    @property
    def prompt(self) -> Prompt:
        """What it began with."""

    @property
    def response(self) -> Sequence[int]:
        """The tokens behind the prompt: those of the policy, and those that were added."""

    @property
    def room(self) -> int:
        """Tokens that the response may still get."""

    async def generate(self) -> Generation | None:
        """Let the policy go on behind what there is; None: the episode is over, or has no room left.

        Raises:
            EngineFailed: no engine was left for it, `rollout.attempts` times.
        """

    def add(self, tokens: Sequence[int]) -> None:
        """Put tokens behind the response that the policy did not choose; at most `room` of them."""

    async def judge(self, tokens: Sequence[int]) -> Score | None:
        """What the run's verifier says of these tokens; nothing is generated after that. None: it is not wanted."""


class Environment(Protocol):
    """Leads episodes; one for all of a run. See the module's docstring."""

    async def play(self, episode: Episode) -> Score | None:
        """From the prompt to the reward; None: there is none, which counts as 0 where the episode is wanted."""
