"""The words of the project as types: prompts, trajectories, groups and their fates.

All are frozen. Shapes: T tokens of one trajectory (prompt and response), G trajectories of one group.

A *dispatch* is one issue of one prompt: `GroupKey(prompt, attempt)`. Every dispatch ends in exactly one fate:
trained in one version, or discarded with a reason. A discarded prompt that is still wanted is issued again
under the next attempt.

Prompts come from D sources. The prompt at `position` of source s has the index `position * D + s`. So an index tells
its source, and each source can be issued at its own pace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

from rollflow.storage.token_arrays import Bools, Int32s


class Ending(StrEnum):
    """Why an episode or a generation stopped."""

    STOP = "stop"  # the model ended its answer (end-of-sequence)
    LENGTH = "length"  # max_new_tokens reached
    ABORTED = "aborted"  # told to stop; the tokens are incomplete
    FAILED = "failed"  # environment or verifier failed


class DiscardReason(StrEnum):
    """Why a dispatched group was not trained on."""

    STALE = "stale"  # older than the asynchronous ratio allows when its batch was formed
    FAILED = "failed"  # the engine or the verifier died under it
    FILTERED = "filtered"  # carries no signal by the run's own filter
    REDUNDANT = "redundant"  # launched on top of what was needed
    CORRUPT = "corrupt"  # its committed batch was voided: it cannot be read any more, or is not finite

    @property
    def issued_again(self) -> bool:
        """Whether the prompt is issued again under the next attempt."""
        return self is not DiscardReason.FILTERED


class GroupKey(NamedTuple):
    """One dispatch: the prompt's place in the run's order, and which issue of it this is (from 0)."""

    prompt: int
    attempt: int


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object that an entry of the log names."""

    path: str
    size: int  # bytes
    sha256: str


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far each of D sources was issued: source s up to `issued[s]`, and `filtered[s]` of these were filtered.

    The cursor of a new run names no source and covers nothing.
    """

    issued: tuple[int, ...] = ()  # source -> its first position that was never dispatched
    filtered: tuple[int, ...] = ()  # source -> its groups that were discarded as filtered

    def __post_init__(self) -> None:
        """Refuse what cannot be a cursor."""
        if len(self.issued) != len(self.filtered):
            raise ValueError(f"a cursor of {len(self.issued)} sources counts what {len(self.filtered)} had filtered")

    @property
    def sources(self) -> int:
        """D."""
        return len(self.issued)

    @property
    def upcoming(self) -> tuple[int, ...]:
        """The index of each source's next prompt."""
        return tuple(position * self.sources + source for source, position in enumerate(self.issued))

    def covers(self, index: int) -> bool:
        """Whether the prompt at `index` was issued."""
        return self.sources > 0 and index < self.upcoming[index % self.sources]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked. `index` is its place in the run's order; `reference` is what the verifier needs (JSON)."""

    id: str
    index: int
    domain: str
    text: str
    tokens: Sequence[int]
    reference: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished episode over T tokens.

    `loss_mask[t]` is true where the policy chose token t; there `logprobs[t]` (nats) is its log-probability
    under the distribution it was sampled from and `versions[t]` the policy version that produced it. Elsewhere
    they are 0.0 and -1. `started_version` is what staleness counts from. In a run the four are `token_arrays`.
    """

    sample: int
    started_version: int
    tokens: Sequence[int]
    loss_mask: Sequence[bool]
    logprobs: Sequence[float]
    versions: Sequence[int]
    reward: float
    reason: str
    ending: Ending
    generation_seconds: float = 0.0
    reward_seconds: float = 0.0

    @property
    def response_tokens(self) -> int:
        """Tokens the policy chose."""
        return Bools.of(self.loss_mask).data.count(1)


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """The G trajectories of one dispatch: the unit of the advantage baseline and of fate."""

    key: GroupKey
    prompt_id: str
    domain: str
    trajectories: tuple[Trajectory, ...]
    surplus_tokens: int = field(default=0, compare=False)  # of responses that were started beyond G and not needed

    @property
    def started_version(self) -> int:
        """The oldest version any of its trajectories was started under."""
        return min(t.started_version for t in self.trajectories)

    @property
    def newest_version(self) -> int:
        """The newest version that any of its tokens came from; without tokens, the one it was started under."""
        newest = Int32s.joined([Int32s.of(t.versions) for t in self.trajectories]).array.max(initial=-1)
        return max(int(newest), self.started_version)

    @property
    def response_tokens(self) -> int:
        """Tokens the policy chose, over all trajectories."""
        return sum(t.response_tokens for t in self.trajectories)


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """A group as its batch takes it, by `batch.packed`: its rows as `arrow_rows`, and what is said of it."""

    key: GroupKey
    parts: tuple[bytes, ...] = field(repr=False)
    started_version: int
    newest_version: int
    response_tokens: int
    surplus_tokens: int


FinishedGroup: TypeAlias = TrajectoryGroup | PackedGroup  # where nobody looks at its trajectories any more


class Discard(NamedTuple):
    """The fate of a dispatch that was not trained on. Its length counts: dropping biases towards short answers."""

    key: GroupKey
    reason: DiscardReason
    started_version: int
    response_tokens: int

    @property
    def slow(self) -> bool:
        """Whether it ran and was left behind. A dispatch without a token says nothing about its length."""
        return self.reason in (DiscardReason.REDUNDANT, DiscardReason.STALE) and self.response_tokens > 0
