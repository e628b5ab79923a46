"""Splits a trajectory into its parts: the prompt, the policy's generations, the environment's answers.

A part ends where the loss mask changes. Two generations without tokens of the environment between them are one part.
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
    """Consecutive tokens of one author from token `start` on. Only the policy has log-probs and versions."""

    author: Author
    start: int
    tokens: Sequence[int]
    logprobs: Sequence[float] = ()  # one log-probability for each token, in nats
    versions: Sequence[int] = ()

    @property
    def readable(self) -> list[int]:
        """The tokens that have a text: all but the positions of foreign parts."""
        return [token for token in self.tokens if token != NO_TOKEN]

    def value(self, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
        """Return the part as JSON values."""
        value: dict[str, Any] = {"by": self.author, "start": self.start, "tokens": len(self.tokens)}
        value |= {"loss_mask": self.author == "policy", "text": decode(self.readable)}
        if self.logprobs:
            mean, least = sum(self.logprobs) / len(self.logprobs), min(self.logprobs)
            value |= {"versions": dict(Counter(self.versions)), "logprob_mean": mean, "logprob_min": least}
        return value


def split_turns(trajectory: Trajectory) -> list[TurnPart]:
    """Split a trajectory into its parts, in order."""
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
    """Return the tokens of the trajectory's prompt that have a text."""
    return next((part.readable for part in split_turns(trajectory) if part.author == "prompt"), ())
