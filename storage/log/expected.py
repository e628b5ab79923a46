"""What an audit may expect of a run's batches beyond what storage knows by itself: its config's limits, its prompts.

Storage reads no config and makes no prompts, so both are given from above (`tasks/run_expectations.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollflow.storage.flat import ANY_TOKEN
from rollflow.storage.records import DiscardReason, Prompt


@dataclass(frozen=True, slots=True)
class Limits:
    """What a config says of the batches that are committed under it."""

    sources: int  # of prompts
    groups: int  # in a batch
    group_size: int  # G, trajectories of a group
    extra_responses: int  # that are started for a group beyond G
    max_new_tokens: int
    reasons: frozenset[DiscardReason]  # for which a scheduler of this config discards
    made_up: bool = False  # the tokens of responses are: none ends with a stop token
    single_turn: bool = True  # nothing but the policy adds to a response
    oldest_token: bool = False  # a trajectory starts with its oldest token
    filtered: Callable[[Sequence[float]], str | None] = lambda rewards: None  # why a group of these is not trained on


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a run as it was pinned, and its policy's tokens."""

    ask: Callable[[int], tuple[Prompt, bool]]  # the prompt of an index, and whether it is held out for evaluation
    held_out: Mapping[tuple[int, ...], str] = field(default_factory=dict)  # tokens of a held-out prompt -> its id
    vocabulary: int = ANY_TOKEN  # tokens that the policy has
    stops: frozenset[int] = frozenset()  # that end a response


@dataclass(frozen=True, slots=True)
class Expected:
    """What an audit compares with. `unchecked` says why there are no `prompts`, or no `limits` either."""

    limits: Callable[[Mapping[str, Any]], Limits] | None = None  # of a recorded config; `Corrupt` of one that is none
    prompts: Prompts | None = None
    unchecked: str = ""

    @property
    def is_thorough(self) -> bool:
        """Whether both limits and prompts are compared."""
        return self.limits is not None and self.prompts is not None


NOTHING = Expected()
