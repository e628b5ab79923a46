"""Defines the basic types of rollflow: prompts, trajectories, groups, and the reasons to discard a group. All types are
immutable.

In array shapes, T is the number of tokens of one trajectory, prompt and response together. A *dispatch* is one attempt
to generate a group of responses to a prompt, identified by a `GroupKey`. Every dispatch ends in exactly one way: either
one policy version is trained on the group, or the group is discarded for a recorded reason. With D prompt sources, the
prompt at `position` of source s has the index `position * D + s`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

from rollflow.storage.model_input import ModelInput, PlacedPart
from rollflow.storage.token_arrays import Bools, Float32s, Int32s, TokenSets, sum_values


class StopReason(StrEnum):
    """The reason why an episode or a generation stopped."""

    STOP = "stop"  # the policy generated a stop token
    LENGTH = "length"  # max_new_tokens was reached
    ABORTED = "aborted"  # the request to the engine was aborted, so the response is incomplete
    FAILED = "failed"  # the environment or the verifier failed


class Outcome(StrEnum):
    """A scorer's judgement of a response, as one of a fixed set of values. A text in which the scorer explains a
    judgement is stored in the trajectory's field `reason`.
    """

    CORRECT = "correct"
    PARTIAL = "partial"  # some parts of the response's answer are correct
    WRONG = "wrong"
    UNPARSABLE = "unparsable"  # the response has no answer in the expected form
    TIMEOUT = "timeout"  # the deadline passed
    KILLED = "killed"  # the process that judged the response, or ran the program in it, was killed
    UNJUDGED = "unjudged"  # the scorer could not judge the response, for a reason that the policy cannot have caused


class DiscardReason(StrEnum):
    """The reason why a group of responses was discarded and not trained on."""

    STALE = "stale"  # when the batch was formed, the group of responses was older than async_ratio allows
    FAILED = "failed"  # the engine or the verifier failed while the group of responses was generated or scored
    # the run's filter removed the group of responses, because its rewards carry no training signal
    FILTERED = "filtered"
    REDUNDANT = "redundant"  # the group was started in addition to the needed groups, and the batch did not need it
    UNJUDGED = "unjudged"  # a response of the group could not be judged by the scorer, after several tries
    CORRUPT = "corrupt"  # the group's batch was voided: its file was damaged, or a value was not finite

    @property
    def issued_again(self) -> bool:
        """True if a prompt whose responses were discarded for this reason is issued again with the next attempt
        number."""
        return self is not DiscardReason.FILTERED


class GroupKey(NamedTuple):
    """Identifies one attempt to answer a prompt: the prompt's index, and the number of earlier attempts for this
    prompt."""

    prompt: int
    attempt: int


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A stored object that a log entry names, with the object's size and hash."""

    path: str
    size: int  # bytes
    sha256: str


DELTA = ".delta"  # suffix that is appended to the path of a weight file to get the path of its delta


@dataclass(frozen=True, slots=True)
class Cursor:
    """The progress of each prompt source: `issued[s]` prompts of source s were sent to the engines, and `filtered[s]`
    of these prompts were removed by the run's filter.
    """

    issued: tuple[int, ...] = ()  # per prompt source: the number of prompts that were sent to the engines
    filtered: tuple[int, ...] = ()  # per prompt source: the number of prompts that the run's filter removed

    def __post_init__(self) -> None:
        """Raise `ValueError` if the tuples `issued` and `filtered` have different lengths."""
        if len(self.issued) != len(self.filtered):
            raise ValueError(
                f"the cursor has counts of issued prompts for {len(self.issued)} sources, but of filtered prompts "
                f"for {len(self.filtered)}; the numbers must be equal"
            )

    @property
    def sources(self) -> int:
        """The number of prompt sources."""
        return len(self.issued)

    @property
    def upcoming(self) -> tuple[int, ...]:
        """The index of the next prompt of each prompt source."""
        return tuple(position * self.sources + source for source, position in enumerate(self.issued))

    def covers(self, index: int) -> bool:
        """Return whether the prompt at `index` has been sent to the engines."""
        return self.sources > 0 and index < self.upcoming[index % self.sources]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. The field `index` is the prompt's number in the run's order of prompts, and `reference` is what the
    verifier needs, such as the right answer, as JSON values. The field `scorer` names the scorer of the responses; ""
    is the scorer that the config section `[reward]` describes.

    The field `input` is what the policy reads, and `text` is the prompt as a person reads it. The field `messages` is
    the question as chat messages, for scorers that apply another chat template.
    """

    id: str
    index: int
    domain: str
    text: str
    input: ModelInput
    reference: Mapping[str, Any] = field(default_factory=dict)
    scorer: str = ""
    messages: Sequence[Mapping[str, str]] = ()

    @property
    def tokens(self) -> Int32s:
        """The prompt's tokens. Raises `ConfigError` if the prompt contains an image or another part that is not
        tokens.
        """
        return self.input.tokens


class Branch(NamedTuple):
    """The point at which a trajectory branches off an earlier trajectory of the same episode, because the context was
    rewritten or because the new trajectory belongs to another role. Both trajectories begin with the same tokens.
    """

    parent: int  # the number (field `sample`) of the trajectory that this trajectory branches off
    position: int  # number of tokens at the start that both trajectories have in common


UNNAMED_STATE = 0  # stands for the environment state of a turn for which the environment named no state


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished episode: a prompt and a response, T tokens together, with the reward.

    The element `loss_mask[t]` is true if the policy sampled token t. For a sampled token t, `logprobs[t]` (nats) is the
    log-probability of the token under the distribution it was sampled from, and `versions[t]` is the policy version
    that sampled the token. For a token t that the policy did not sample, `logprobs[t]` is 0.0 and `versions[t]` is -1.
    The staleness of a trajectory is counted from the policy version `started_version`. In a run, the four sequences
    `tokens`, `loss_mask`, `logprobs` and `versions`, of length T, are token arrays.

    None stands for a value that was not recorded. The field `turn_starts` lists the position of the first sampled token
    of each turn. The field `turn_states` has one 64-bit hash for each turn: the environment state in which the turn
    acted, or `UNNAMED_STATE` for a turn whose state the environment did not name. The field `routed_experts` lists, for
    each of the T tokens, the experts to which the token was routed in every layer, with -1 for an unknown expert. The
    field `foreign_parts` lists the parts that are not tokens, such as images; at the positions of these parts
    `tokens[t]` is `NO_TOKEN`. The field `kept_tokens` has one set of tokens for each token t: the candidates among
    which the sampler chose token t after top-k and top-p. In `kept_tokens`, the set of token t is empty if the sampler
    chose among all tokens, or if the policy did not sample token t. The field `scorer_version` is the version of the
    scorer that gave the reward. The field `token_rewards` has one number for each of the T tokens: the token's own
    reward, or NaN if the token has none. Token rewards count in addition to `reward`. Only sampled tokens have token
    rewards. In an episode in which the policy plays several roles, the field `role` names the role in which the policy
    sampled the tokens, and `reward` is the reward of this role. The field `left_out` is True if the learner leaves the
    response out because no scorer could judge it: the response is in no advantage baseline and is not trained on. A
    left-out response has the outcome "unjudged", a `reason` that says why nobody could judge it, and the `reward` NaN.
    `left_out` is None for all responses that are not left out.
    """

    sample: int
    started_version: int
    tokens: Sequence[int]
    loss_mask: Sequence[bool]
    logprobs: Sequence[float]
    versions: Sequence[int]
    reward: float
    reason: str
    ending: StopReason
    generation_seconds: float = 0.0
    reward_seconds: float = 0.0
    reward_parts: Mapping[str, float] | None = None
    outcome: Outcome | None = None
    turn_starts: Sequence[int] | None = None
    branch: Branch | None = None
    routed_experts: Sequence[int] | None = None
    kept_tokens: TokenSets | None = None
    foreign_parts: tuple[PlacedPart, ...] | None = None
    scorer_version: str | None = None
    token_rewards: Sequence[float] | None = None
    turn_states: Sequence[int] | None = None
    role: str | None = None
    left_out: bool | None = None

    @property
    def total_reward(self) -> float:
        """The reward of the response as a whole, plus all token rewards. Each reward is rounded to float32, as in
        storage.
        """
        if self.token_rewards is None:
            return self.reward
        [reward] = Float32s.of([self.reward])
        return reward + sum_values(Float32s.of(self.token_rewards))

    @property
    def input(self) -> ModelInput:
        """The whole token sequence of the trajectory as a `ModelInput`: the prompt, the response, and what the
        environment added to the response."""
        return ModelInput.from_flat(Int32s.of(self.tokens), self.foreign_parts or ())

    @property
    def response_tokens(self) -> int:
        """The number of the trajectory's tokens that the policy sampled."""
        return Bools.of(self.loss_mask).data.count(1)


class PassRate(NamedTuple):
    """The number of correct responses in a finished group of responses to one prompt. The field `prompt` is the index
    of the prompt that the group answers."""

    prompt: int
    correct: int
    responses: int


# a response is left out of its group only if at least this many other responses of the group were judged
LEAST_JUDGED = 2
LONGEST_WHY = 300  # largest number of characters of a reason in an `UnjudgedResponse`


class UnjudgedResponse(NamedTuple):
    """The log's record of a response that nobody could judge, with the reason. Either the response's group was
    discarded, or the response is left out of its group.
    """

    prompt: int
    attempt: int
    sample: int  # number of the response in its group
    why: str

    @property
    def key(self) -> GroupKey:
        """The key of the response's dispatch."""
        return GroupKey(self.prompt, self.attempt)


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """A group: the trajectories of one attempt to answer a prompt. The trajectories of a group share one advantage
    baseline, and are trained on or discarded together.
    """

    key: GroupKey
    prompt_id: str
    domain: str
    trajectories: tuple[Trajectory, ...]
    # number of tokens in surplus responses, which were generated for the group and not used
    surplus_tokens: int = field(default=0, compare=False)

    @property
    def started_version(self) -> int:
        """The oldest policy version under which a trajectory of the group was started."""
        return min(t.started_version for t in self.trajectories)

    @property
    def newest_version(self) -> int:
        """The newest policy version that sampled a token of the group's trajectories; `started_version` if no token was
        sampled."""
        newest = Int32s.concatenate([Int32s.of(t.versions) for t in self.trajectories]).array.max(initial=-1)
        return max(int(newest), self.started_version)

    @property
    def response_tokens(self) -> int:
        """The number of tokens that the policy sampled in all trajectories of the group."""
        return sum(t.response_tokens for t in self.trajectories)

    @property
    def episodes(self) -> int:
        """The number of episodes in the group; an episode counts once, no matter how many branches the episode has."""
        return sum(t.branch is None for t in self.trajectories)

    @property
    def left_out(self) -> tuple[UnjudgedResponse, ...]:
        """The responses of the group that nobody could judge, and that the learner leaves out."""
        unjudged = [t for t in self.trajectories if t.left_out and t.branch is None]
        return tuple(UnjudgedResponse(*self.key, t.sample, t.reason[:LONGEST_WHY]) for t in unjudged)

    @property
    def episode_rewards(self) -> list[float]:
        """The total reward of each judged episode, which includes the token rewards of the episode's branches. In an
        episode with several roles, only the role of the episode's first trajectory counts.
        """
        judged = [t for t in self.trajectories if not t.left_out]
        if self.episodes == len(self.trajectories):
            return [t.total_reward for t in judged]
        # `first` maps each trajectory's sample number to the first trajectory of the same episode
        totals, first = dict[int, float](), dict[int, Trajectory]()
        for t in judged:
            first[t.sample] = found = t if t.branch is None else first[t.branch.parent]
            if found is t:
                totals[t.sample] = t.total_reward
            elif t.token_rewards is not None and t.role == found.role:
                totals[found.sample] += sum_values(Float32s.of(t.token_rewards))
        return [*totals.values()]

    @property
    def pass_rate(self) -> PassRate | None:
        """The numbers of correct and of all judged responses in the group; None if it is unknown whether a response is
        correct. In the pass rate, an episode counts once, even if several trajectories branch off it.
        """
        outcomes = [t.outcome for t in self.trajectories if t.branch is None and not t.left_out]
        return None if None in outcomes else PassRate(self.key.prompt, outcomes.count(Outcome.CORRECT), len(outcomes))


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """A trajectory group whose rows are packed as the raw bytes of Arrow columns (see `arrow_rows`), with counts for
    the log.
    """

    key: GroupKey
    parts: tuple[bytes, ...] = field(repr=False)
    started_version: int
    newest_version: int
    response_tokens: int
    surplus_tokens: int
    # maps the name of an optional column to the column's values for the group's rows
    optional: Mapping[str, Any] = field(default_factory=dict, repr=False)
    pass_rate: PassRate | None = None
    left_out: tuple[UnjudgedResponse, ...] = ()  # responses that nobody could judge, and that the learner leaves out


# a complete group of trajectories, either as objects or packed as Arrow columns
FinishedGroup: TypeAlias = TrajectoryGroup | PackedGroup


class Discard(NamedTuple):
    """The record of a group of responses that was discarded. The response tokens of a discarded group of responses are
    counted, because discarding mainly long responses would bias training.
    """

    key: GroupKey
    reason: DiscardReason
    started_version: int
    response_tokens: int

    @property
    def slow(self) -> bool:
        """True if the responses were discarded as stale or redundant after the policy had sampled tokens for them."""
        return self.reason in (DiscardReason.REDUNDANT, DiscardReason.STALE) and self.response_tokens > 0
