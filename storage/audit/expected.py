"""Defines the limits and the prompts with which an audit compares the trajectory batches of a run.

The package `storage` parses no config and creates no prompts, so the caller of an audit provides both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollflow.storage.log.entries import EpochStarted
from rollflow.storage.records import DiscardReason, PassRate, Prompt
from rollflow.storage.token_arrays import ANY_TOKEN


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The limits that a run's config sets for the batches that are committed while the config applies."""

    sources: int  # number of prompt sources
    groups: int  # number of groups per batch
    group_size: int  # number of trajectories per group
    redundant_responses: int  # number of responses per prompt that are started in addition to `group_size`
    max_new_tokens: int
    judges_all: bool  # true: only responses that the scorer could judge are trained on
    # names of the scorers whose unjudged responses are left out of their groups
    leave_out: frozenset[str] = field(default=frozenset(), kw_only=True)
    # true: a prompt whose environment was removed is filtered, and the reason is recorded as an unjudged response
    removes: bool = field(default=False, kw_only=True)
    # reasons for which the scheduler may discard groups of responses under this config
    reasons: frozenset[DiscardReason]
    made_up: bool = False  # true: the engine `timed` invents the tokens, so no response ends with a stop token
    single_turn: bool = True  # true: the policy sampled all tokens of a response, and an environment added none
    replaces_prompts: bool = False  # true: an episode may begin with other tokens than those of its prompt
    oldest_token: bool = False  # true: a trajectory's start version is the policy version of its oldest token
    # largest number of tokens that the policy may sample in one episode; None: no limit
    episode_tokens: int | None = None
    # maps the rewards of a group to the reason why the config's filter removes the group, or to None
    filtered: Callable[[Sequence[float]], str | None] = lambda rewards: None

    def bound_tokens(self, episodes: int) -> float:
        """Return the largest number of tokens that the policy may sample in the given number of episodes."""
        most = self.max_new_tokens if self.single_turn else self.episode_tokens
        return math.inf if most is None else episodes * most


@dataclass(frozen=True, slots=True)
class ExpectedPrompts:
    """The prompts of a run, with the vocabulary size and the stop tokens of the run's policy."""

    # maps an index to the prompt, and to whether the prompt is held out from training
    ask: Callable[[int], tuple[Prompt, bool]]
    # maps the tokens of a prompt that is held out from training to the prompt's id
    held_out: Mapping[tuple[int, ...], str] = field(default_factory=dict)
    vocabulary: int = ANY_TOKEN  # size of the policy's vocabulary
    stops: frozenset[int] = frozenset()  # tokens that end a response
    # maps a prompt source, its previous epoch, the log entry of that epoch and the pass rates since then to the next
    # epoch
    propose_epoch: Callable[[int, EpochStarted | None, int | None, Mapping[int, PassRate]], EpochStarted] | None = None


@dataclass(frozen=True, slots=True)
class Expected:
    """The expectations of an audit. If `prompts` or `limits` is None, batches are not compared with prompts or limits,
    and `unchecked` says why.
    """

    limits: Callable[[Mapping[str, Any]], BatchLimits] | None = (
        None  # returns the limits that a recorded config sets; may raise `Corrupt`
    )
    prompts: ExpectedPrompts | None = None
    unchecked: str = ""

    @property
    def is_thorough(self) -> bool:
        """True if the audit compares batches with both limits and prompts."""
        return self.limits is not None and self.prompts is not None


NOTHING = Expected()
