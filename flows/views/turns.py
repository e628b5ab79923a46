"""Splits a trajectory into parts: the prompt, the responses of the policy, and the answers of the environment.

A part of a trajectory ends where the value of the loss mask changes. Two responses without environment tokens between
them form one part of the trajectory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from rollflow.storage.model_input import NO_TOKEN
from rollflow.storage.records import Trajectory

Author = Literal["prompt", "policy", "environment"]


@dataclass(frozen=True, slots=True)
class TurnPart:
    """Consecutive tokens of a trajectory that have the same author, from token number `start` on. `logprobs` and
    `versions` are set only if the policy generated the tokens.
    """

    author: Author
    start: int
    tokens: Sequence[int]
    logprobs: Sequence[float] = ()  # Log-probability in nats of each token.
    versions: Sequence[int] = ()

    @property
    def readable(self) -> list[int]:
        """The tokens of this part that have text. Positions of images and of other input are left out."""
        return [token for token in self.tokens if token != NO_TOKEN]

    def value(self, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
        """Return this part of the trajectory as JSON values, with its text."""
        value: dict[str, Any] = {"by": self.author, "start": self.start, "tokens": len(self.tokens)}
        value |= {"loss_mask": self.author == "policy", "text": decode(self.readable)}
        if self.logprobs:
            mean, least = sum(self.logprobs) / len(self.logprobs), min(self.logprobs)
            value |= {"versions": dict(Counter(self.versions)), "logprob_mean": mean, "logprob_min": least}
        return value


def split_turns(trajectory: Trajectory) -> list[TurnPart]:
    """Split a trajectory into the prompt, the policy's responses and the environment's answers, in order of their
    tokens.
    """
    parts = list[TurnPart]()
    start = 0
    for chosen, masks in groupby(trajectory.loss_mask):
        end = start + len(list(masks))
        tokens = list(trajectory.tokens[start:end])
        if chosen:
            own = list(trajectory.logprobs[start:end]), list(trajectory.versions[start:end])
            parts.append(TurnPart("policy", start, tokens, *own))
        else:
            parts.append(TurnPart("environment" if parts else "prompt", start, tokens))
        start = end
    return parts


def prompt_tokens(trajectory: Trajectory) -> Sequence[int]:
    """Return the tokens of a trajectory's prompt that have text."""
    return next((part.readable for part in split_turns(trajectory) if part.author == "prompt"), ())
