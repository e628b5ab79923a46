"""Stores the finished turns (generations of the policy) of running episodes in files `turns/<claim>-<number>.jsonl`.
After a crash, a new scheduler continues each episode from its last stored turn.

Each file has turns of many episodes and snapshots of environments, one per line; the first line is the SHA-256 of the
other lines. If a file is missing or damaged, the turns in the file are generated again.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import Base64Bytes, TypeAdapter, ValidationError

from rollflow.storage.errors import Corrupt
from rollflow.storage.records import GroupKey, StopReason
from rollflow.storage.token_arrays import Float32s, Int32s

FOLDER = "turns"


@dataclass(frozen=True, slots=True)
class TurnKey:
    """The key of a turn: its group, the number of the episode in the group, and the number of the turn in the
    episode.
    """

    group: GroupKey
    sample: int
    turn: int


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """A finished turn, which has the T tokens that the policy sampled, their log-probs (nats) and policy versions.

    The field `request` is a hash of everything but the weights that determines the generation, such as the context. The
    field `started_version` is the policy version under which the request started.
    """

    key: TurnKey
    request: str
    started_version: int
    ending: StopReason
    tokens: Int32s
    logprobs: Float32s
    versions: Int32s

    @property
    def digest(self) -> str:
        """A hash of the tokens that the policy generated, with their log-probs and policy versions."""
        return hash_parts(self.tokens.data, self.logprobs.data, self.versions.data)


class EpisodeEvent(NamedTuple):
    """An event in an episode. The field `kind` is the name of the episode's method that was called, or "turn" for a
    turn, whose `value` is the turn's digest.
    """

    kind: str
    value: Any


@dataclass(frozen=True, slots=True)
class EnvironmentSnapshot:
    """A snapshot of an episode's environment, and all events in the episode since the previous snapshot.

    `key.turn` is the number of turns before the snapshot, and `number` counts the snapshots of the episode. `parent` is
    the digest of the previous snapshot, or "" for the first one. `basis` is a hash of the prompt, the limits and the
    seed with which the episode began.
    """

    key: TurnKey
    number: int
    parent: str
    basis: str
    events: tuple[EpisodeEvent, ...]
    data: bytes

    @property
    def digest(self) -> str:
        """A hash of the snapshot and of all earlier events and snapshots of the episode."""
        return hash_parts(self.parent.encode(), self.basis.encode(), json.dumps(self.events).encode(), self.data)


Record = FinishedTurn | EnvironmentSnapshot


class _TurnLine(NamedTuple):
    """The line of a file that stores a turn. The token arrays are stored as the bytes of their numbers."""

    prompt: int
    attempt: int
    sample: int
    turn: int
    request: str
    started_version: int
    ending: StopReason
    tokens: Base64Bytes
    logprobs: Base64Bytes
    versions: Base64Bytes


class _SnapshotLine(NamedTuple):
    """The line of a file that stores a snapshot of an environment."""

    prompt: int
    attempt: int
    sample: int
    turn: int
    number: int
    parent: str
    basis: str
    events: list[EpisodeEvent]
    data: Base64Bytes


_LINES: TypeAdapter[_TurnLine | _SnapshotLine] = TypeAdapter(_TurnLine | _SnapshotLine)


def hash_parts(*parts: bytes | memoryview) -> str:
    """Return a hash of several values and their lengths."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def turns_path(claim: int, number: int) -> str:
    """Return the path of file `number` of the scheduler that claimed its role by log entry `claim`."""
    return f"{FOLDER}/{claim:010d}-{number:010d}.jsonl"


def encode_turns(records: Sequence[Record]) -> bytes:
    """Return the content of a file with the given turns and snapshots."""
    lines = "".join(map(_encode, records)).encode()
    return hashlib.sha256(lines).hexdigest().encode() + b"\n" + lines


def decode_turns(data: bytes) -> list[Record]:
    """Parse the content of a file, and return its turns and snapshots.

    Raises:
        Corrupt: the file is damaged.
    """
    sha256, _, lines = data.partition(b"\n")
    if hashlib.sha256(lines).hexdigest().encode() != sha256:
        raise Corrupt("a file of finished turns was altered: its content does not match the SHA-256 in its first line")
    try:
        return [_decode(_LINES.validate_json(line)) for line in lines.splitlines()]
    except ValidationError as error:
        raise Corrupt(f"a file of finished turns has an invalid line: {error}") from error


def _encode(record: Record) -> str:
    key = record.key
    place = (key.group.prompt, key.group.attempt, key.sample, key.turn)
    if isinstance(record, EnvironmentSnapshot):
        data = base64.b64encode(record.data).decode()
        return json.dumps([*place, record.number, record.parent, record.basis, record.events, data]) + "\n"
    arrays = (base64.b64encode(array.data).decode() for array in (record.tokens, record.logprobs, record.versions))
    return json.dumps([*place, record.request, record.started_version, record.ending, *arrays]) + "\n"


def _decode(line: _TurnLine | _SnapshotLine) -> Record:
    key = TurnKey(GroupKey(line.prompt, line.attempt), line.sample, line.turn)
    if isinstance(line, _SnapshotLine):
        return EnvironmentSnapshot(key, line.number, line.parent, line.basis, tuple(line.events), line.data)
    tokens, logprobs, versions = Int32s(line.tokens), Float32s(line.logprobs), Int32s(line.versions)
    if not len(tokens) == len(logprobs) == len(versions):
        raise Corrupt("a finished turn must have one log-prob and one version for each token, but the numbers differ")
    return FinishedTurn(key, line.request, line.started_version, line.ending, tokens, logprobs, versions)
