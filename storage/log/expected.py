"""What an audit expects of a run's batches beyond what storage knows by itself: its config's limits, its prompts.

Storage reads no config and makes no prompts, so the caller provides both (`tasks/run/expectations.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollflow.storage.records import DiscardReason, Prompt
from rollflow.storage.token_arrays import ANY_TOKEN


@dataclass(frozen=True, slots=True)
class Limits:
    """What a config allows in the batches that are committed under it."""

    sources: int  # of prompts
    groups: int  # in a batch
    group_size: int  # G, trajectories in a group
    extra_responses: int  # responses that are started for a group beyond G
    max_new_tokens: int
    reasons: frozenset[DiscardReason]  # reasons for which a scheduler of this config discards
    made_up: bool = False  # responses are made-up tokens: none ends with a stop token
    single_turn: bool = True  # nothing but the policy adds to a response
    oldest_token: bool = False  # a trajectory starts with its oldest token
    filtered: Callable[[Sequence[float]], str | None] = lambda rewards: None  # why a group is not trained on


@dataclass(frozen=True, slots=True)
class Prompts:
    """The pinned prompts of a run, and the tokens of its policy."""

    ask: Callable[[int], tuple[Prompt, bool]]  # index -> its prompt, and whether that is held out
    held_out: Mapping[tuple[int, ...], str] = field(default_factory=dict)  # tokens of a held-out prompt -> its id
    vocabulary: int = ANY_TOKEN  # size of the policy's vocabulary
    stops: frozenset[int] = frozenset()  # tokens that end a response


@dataclass(frozen=True, slots=True)
class Expected:
    """What an audit compares with. `unchecked` says why `prompts`, or `limits` too, are missing."""

    limits: Callable[[Mapping[str, Any]], Limits] | None = None  # of a recorded config, or `Corrupt`
    prompts: Prompts | None = None
    unchecked: str = ""

    @property
    def is_thorough(self) -> bool:
        """True if both limits and prompts are compared."""
        return self.limits is not None and self.prompts is not None


NOTHING = Expected()
