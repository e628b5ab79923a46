"""Stores the turns of an episode, and the branches to which they belong.

A branch contains the tokens after the prompt, until the environment rewrites the context and a new branch begins. Each
role of an episode has branches of its own. A position is the number of tokens between the prompt and a token.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import UNNAMED_STATE, StopReason
from rollflow.storage.token_arrays import Float32s, Int32s, Int64s
from rollflow.tasks.engines.base import Generation, TokenSpan
from rollflow.tasks.scorers.token_values import add_values, move_to_sampled

CHOSEN = b"\1"
UNSAMPLED = Int32s.of([-1]).data  # policy version of a token that the environment added
LONGEST_ROLE = 100  # largest number of characters of the name of a role


@dataclass(slots=True)
class LivedTurn:
    """One turn of the policy: a generation with at least one token."""

    start: int  # position of the turn's first token
    end: int  # position after the turn's last token
    state: int  # hash of the environment state in which the turn acted
    reward: float | None = None


@dataclass(eq=False, slots=True)
class LivedBranch:
    """The tokens of one branch of an episode, and its turns.

    The tokens of a branch are stored in parts, which are joined only when they are read, so that adding a turn copies
    no earlier turns.
    """

    role: str = ""  # name of the role that acts in the branch; "" if the episode has no roles
    turns: list[LivedTurn] = field(default_factory=list)
    ending: StopReason = StopReason.STOP
    length: int = 0  # number of tokens
    _parts: list[bytes] = field(default_factory=list)  # for each part three entries: tokens, log-probs, versions
    _joined: TokenSpan | None = None  # all parts joined; None after a part was added

    @property
    def made(self) -> TokenSpan:
        """The tokens of the branch, with their log-probs and policy versions."""
        if self._joined is None:
            tokens, logprobs, versions = self._parts = [b"".join(self._parts[kind::3]) for kind in range(3)]
            self._joined = TokenSpan(Int32s(tokens), Float32s(logprobs), Int32s(versions))
        return self._joined

    @property
    def mask(self) -> bytes:
        """The origin of each token, as a byte: 1 if the policy generated the token, 0 if the environment added it."""
        mask = bytearray(self.length)
        for turn in self.turns:
            mask[turn.start : turn.end] = CHOSEN * (turn.end - turn.start)
        return bytes(mask)

    def follow(self, prompt: ModelInput) -> ModelInput:
        """Return the context of the next turn: the prompt, followed by the tokens of the branch."""
        if not self.length:
            return prompt
        return ModelInput(Int32s(b"".join([prompt.flat.data, *self._parts[::3]])), prompt.placed)

    def ends_with(self, tokens: Int32s) -> bool:
        """Return whether `tokens` are the same object as the newest part of the branch; such tokens need no check."""
        return bool(self._parts) and tokens.data is self._parts[-3]

    def add_given(self, tokens: Int32s) -> None:
        """Append tokens that the policy did not generate."""
        count = len(tokens)
        self._add_part(tokens.data, bytes(Float32s.size * count), UNSAMPLED * count)

    def add_generation(self, generation: Generation, state: int) -> LivedTurn | None:
        """Append a generation and return its turn, or None if the generation has no token."""
        start = self.length
        made = generation.made
        self._add_part(made.tokens.data, made.logprobs.data, made.versions.data)
        self.ending = generation.ending
        if self.length == start:
            return None
        turn = LivedTurn(start, self.length, state)
        self.turns.append(turn)
        return turn

    def _add_part(self, tokens: bytes, logprobs: bytes, versions: bytes) -> None:
        self._parts += (tokens, logprobs, versions)
        self._joined = None
        self.length += len(tokens) // Int32s.size

    def find_starts(self, prompt: int) -> tuple[int, ...]:
        """Return the index of each turn's first token in a trajectory whose prompt has `prompt` tokens."""
        return tuple(turn.start + prompt for turn in self.turns)

    def find_states(self) -> Sequence[int] | None:
        """Return the hashed environment state of each turn; None if no turn has a named state."""
        states = [turn.state for turn in self.turns]
        return Int64s.of(states) if any(state != UNNAMED_STATE for state in states) else None

    def place_rewards(self, values: Float32s | None) -> Float32s | None:
        """Return the reward of each token (NaN without a reward), or None if no token has a reward.

        The reward of a turn is added at its last token. `values` are rewards of single tokens; a value of a token that
        was not sampled moves to the last sampled token before it.
        """
        found = None if values is None else move_to_sampled(values, np.frombuffer(self.mask, bool))
        rewards = {turn.end - 1: turn.reward for turn in self.turns if turn.reward is not None}
        return add_values(found, rewards, self.length) if rewards else found

    def find_oldest(self, default: int) -> int:
        """Return the oldest policy version that generated a token of the branch; `default` if the policy generated no
        token."""
        return min((version for version in self.made.versions if version >= 0), default=default)


@dataclass(eq=False, slots=True)
class LivedEpisode:
    """All branches of an episode, in the order in which they began. The newest branch of the acting role is the current
    branch."""

    branches: list[LivedBranch] = field(default_factory=lambda: [LivedBranch()])
    current: LivedBranch = field(init=False)  # the branch that the next turn continues
    role: str = ""  # name of the role that acts
    _upcoming: int = UNNAMED_STATE  # hash of the state of the next turn

    def __post_init__(self) -> None:
        self.current = self.branches[-1]

    @property
    def played(self) -> list[LivedBranch]:
        """The branches with turns; if there are none, the current branch."""
        return [branch for branch in self.branches if branch.turns] or [self.current]

    @property
    def is_fresh(self) -> bool:
        """True if the acting role has not acted yet, and its context contains only the prompt."""
        return not any(branch.turns or branch.length for branch in self.branches if branch.role == self.role)

    def add_generation(self, generation: Generation) -> None:
        """Append a generation to the current branch."""
        if self.current.add_generation(generation, self._upcoming) is not None:
            self._upcoming = UNNAMED_STATE

    def add_reward(self, value: float) -> None:
        """Add a reward to the newest turn of the acting role.

        Raises:
            ValueError: there is no turn yet.
        """
        own = (branch for branch in reversed(self.branches) if branch.role == self.role and branch.turns)
        if (branch := next(own, None)) is None:
            raise ValueError(
                "the episode has no turn that could get the reward yet; give a reward after `generate` has "
                "returned a generation"
            )
        branch.turns[-1].reward = (branch.turns[-1].reward or 0.0) + value

    def enter_state(self, key: str) -> None:
        """Set the state of the next turn."""
        self.enter_hashed(hash_state(key))

    def enter_hashed(self, state: int) -> None:
        """Set the state of the next turn, given the hash of the state's name."""
        self._upcoming = state

    def start_branch(self, tokens: Int32s) -> None:
        """Begin a branch with `tokens`, on which the policy is not trained."""
        kept = (branch for branch in self.branches if branch.turns or branch.role != self.role)
        self.current = LivedBranch(self.role)
        self.branches = [*kept, self.current]
        self.current.add_given(tokens)

    def take_role(self, name: str) -> None:
        """Let a role act; a role that has acted before continues its newest branch.

        Raises:
            ValueError: the name is empty or too long.
            TypeError: the name is not a string.
        """
        if not isinstance(name, str):
            raise TypeError(f"the name of a role must be a string, not a {type(name).__name__}")
        name.encode()  # a lone surrogate raises a `ValueError`, because storage cannot encode it
        if not 0 < len(name) <= LONGEST_ROLE:
            raise ValueError(f"the name of a role must have 1 to {LONGEST_ROLE} characters, not {len(name)}")
        self.role, found = name, next((one for one in reversed(self.branches) if one.role == name), None)
        if found is None:
            self.branches.append(found := LivedBranch(name))
        self.current = found


def find_parent(tokens: Int32s, earlier: Sequence[Int32s]) -> tuple[int, int]:
    """Return the index of the earlier token sequence that shares the longest beginning with `tokens`, and the length of
    this beginning."""
    shared = [_count_shared(tokens, other) for other in earlier]
    parent = shared.index(max(shared))
    return parent, shared[parent]


def _count_shared(one: Int32s, other: Int32s) -> int:
    least = min(len(one), len(other))
    differ = np.flatnonzero(one.array[:least] != other.array[:least])
    return int(differ[0]) if differ.size else least


def hash_state(key: str) -> int:
    """Return a 64-bit hash of the name of an environment state. The hash is never `UNNAMED_STATE`.

    Raises:
        TypeError: the name is not a string.
    """
    if not isinstance(key, str):
        raise TypeError(f"the key of a state must be a string, not a {type(key).__name__}")
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True) or 1


def check_tokens(tokens: Sequence[int], vocabulary: int) -> Int32s:
    """Convert tokens from an environment; reject token ids outside the vocabulary, which could crash an engine.

    Raises:
        ValueError: the vocabulary contains no such token.
        TypeError: a token is not an integer.
    """
    if isinstance(tokens, Int32s):
        wrong = tokens.array[(tokens.array < 0) | (tokens.array >= vocabulary)].tolist()
    else:
        tokens = [operator.index(token) for token in tokens]
        wrong = [token for token in tokens if not 0 <= token < vocabulary]
    if wrong:
        last = vocabulary - 1
        raise ValueError(f"{wrong[0]} is not a token of the policy, whose {vocabulary} tokens are numbered 0 to {last}")
    return Int32s.of(tokens)
