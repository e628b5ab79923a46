"""An episode that records its history, so that a snapshot of its environment can restore the episode after a crash.

    generate, add, reward, ... --> events --> snapshot: events since the snapshot before it, and the environment's bytes

After a crash, the recorded events are applied to a new episode, and then the environment is restored.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollflow.storage.errors import RollflowError
from rollflow.storage.records import GroupKey, Prompt
from rollflow.storage.run_records.finished_turns import EnvironmentSnapshot, EpisodeEvent, TurnKey, hash_parts
from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.engines.base import Generation
from rollflow.tasks.environments.base import SnapshotRejected
from rollflow.tasks.environments.conversation import Conversation, Extension
from rollflow.tasks.environments.limits import EpisodeLimits
from rollflow.tasks.environments.ports import Message
from rollflow.tasks.environments.turns import hash_state
from rollflow.tasks.rollout.episode import PlayedEpisode
from rollflow.tasks.rollout.limits import RolloutLimits
from rollflow.tasks.rollout.proxy import VersionedGeneration
from rollflow.tasks.rollout.resuming.journal import TurnJournal
from rollflow.tasks.rollout.resuming.restore_point import RestorePoint


@dataclass(frozen=True, slots=True)
class EpisodePlace:
    """The place where the history of an episode is stored, and a hash of the episode's inputs."""

    journal: TurnJournal = field(default_factory=TurnJournal)
    group: GroupKey = GroupKey(0, 0)  # noqa: RUF009 - a key is immutable
    sample: int = 0
    basis: str = ""


@dataclass(eq=False)
class RecordedEpisode(PlayedEpisode):
    """An episode whose history is recorded."""

    place: EpisodePlace = field(default_factory=EpisodePlace)
    keeps_snapshots: bool = True
    _events: list[EpisodeEvent] = field(default_factory=list)  # events since the newest snapshot
    _number: int = 0  # number of the next snapshot
    _parent: str = ""  # digest of the newest snapshot
    _mutes: bool = False  # True during a call whose inner calls are not recorded as separate events

    async def generate(self, stop: Sequence[str] = (), max_tokens: int | None = None) -> Generation | None:
        """Let the policy continue the response, as `Episode.generate` specifies."""
        self.snapshot = None
        return await super().generate(stop, max_tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens that the policy did not generate, as `Episode.add` specifies."""
        given = self._check_tokens(tokens)
        super().add(given)
        self._note("add", encode_tokens(given))

    def start_branch(self, tokens: Sequence[int]) -> None:
        """Continue with a rewritten context, as `Episode.start_branch` specifies."""
        given = self._check_tokens(tokens)
        super().start_branch(given)
        self._note("start_branch", encode_tokens(given))

    def take_role(self, name: str) -> None:
        """Let the policy act in a role, as `Episode.take_role` specifies."""
        super().take_role(name)
        self._note("take_role", name)

    def _apply_extension(self, messages: Sequence[Message], talk: Conversation, found: Extension) -> bool:
        """Do what `PlayedEpisode` does with the messages, and record them as one event."""
        mutes, self._mutes = self._mutes, True
        try:
            extended = super()._apply_extension(messages, talk, found)
        finally:
            self._mutes = mutes
        if extended:
            self._note("extend", [dict(message) for message in messages])
        return extended

    def reward(self, value: float) -> None:
        """Give the newest turn a reward, as `Episode.reward` specifies."""
        super().reward(value)
        self._note("reward", float(value))

    def enter_state(self, key: str) -> None:
        """Name the environment state of the next turn, as `Episode.enter_state` specifies."""
        super().enter_state(key)
        self._note("enter_state", hash_state(key))

    def replace_prompt(self, tokens: Sequence[int]) -> None:
        """Begin the episode with these tokens instead of the prompt's tokens, as `Episode.replace_prompt` specifies."""
        given = self._check_tokens(tokens)
        super().replace_prompt(given)
        self._note("replace_prompt", encode_tokens(given))

    def save_snapshot(self, data: bytes) -> None:
        """Store a snapshot of the environment, as `Episode.save_snapshot` specifies."""
        super().save_snapshot(data)
        # Events cannot record a missing score, so an unjudged episode stores no snapshot.
        if self.wanted is not None or self.unjudged is not None or not self.place.journal.accepts_size(len(data)):
            return
        place = self.place
        key = TurnKey(place.group, place.sample, self.turns)
        snapshot = EnvironmentSnapshot(key, self._number, self._parent, place.basis, tuple(self._events), bytes(data))
        place.journal.record_snapshot(snapshot)
        self._events, self._number, self._parent = [], self._number + 1, snapshot.digest

    def forget_turns(self, reason: str) -> None:
        """Let the policy generate all further turns instead of recalling stored turns, as `Episode.forget_turns`
        specifies.
        """
        place = self.place
        if place.journal.has_turns(place.group, place.sample):
            place.journal.forget_turns(TurnKey(place.group, place.sample, self.turns), reason)

    def restore(self, point: RestorePoint) -> None:
        """Bring the episode to its state at a snapshot, by repeating the recorded events.

        Raises:
            SnapshotRejected: the events do not fit this episode.
        """
        self._mutes = True
        try:
            for event in point.events:
                self._apply(event)
        except (ValueError, TypeError, KeyError, RollflowError) as error:
            raise SnapshotRejected(
                f"the events that were recorded with the snapshot cannot be repeated ({error})"
            ) from error
        finally:
            self._mutes = False
        self.snapshot, self._number, self._parent = point.data, point.number + 1, point.digest

    def _apply(self, event: EpisodeEvent) -> None:
        kind, value = event
        match kind:
            case "turn":
                self._append_generation(value)
            case "add" | "start_branch" | "replace_prompt":
                getattr(self, kind)(decode_tokens(value))
            case "take_role":
                self.take_role(value)
            case "reward":
                self.reward(value)
            case "enter_state":
                self.lived.enter_hashed(value)
            case "extend":
                if not self.extend(value):
                    raise ValueError("the recorded messages leave no room for an answer")
            case _:
                raise ValueError(f"an event of the unknown kind {kind!r} was recorded")

    def _append_generation(self, started: VersionedGeneration) -> None:
        super()._append_generation(started)
        made = started.generation.made
        self._note("turn", hash_parts(made.tokens.data, made.logprobs.data, made.versions.data))

    def _note(self, kind: str, value: Any) -> None:
        if not self._mutes:
            self._events.append(EpisodeEvent(kind, value))


def encode_tokens(tokens: Int32s) -> str:
    """Return tokens as text, in base64."""
    return base64.b64encode(tokens.data).decode()


def decode_tokens(text: str) -> Int32s:
    """Return the tokens that `encode_tokens` wrote as text."""
    return Int32s(base64.b64decode(text))


def hash_basis(prompt: Prompt, limits: RolloutLimits, bounds: EpisodeLimits, seed: int) -> str:
    """Return a hash of all inputs of an episode on which its turns depend."""
    options = (limits.max_new_tokens, limits.temperature, seed, bounds, prompt.input.placed)
    return hash_parts(prompt.input.flat.data, repr(options).encode())
