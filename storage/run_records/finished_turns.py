"""Stores the finished turns of running episodes: `turns/<claim>-<number>.jsonl`, each file with turns of many episodes.

A turn is one generation of the policy in an episode of several turns. After a crash, a new scheduler reads the stored
turns, so that an episode continues behind its last stored turn. The run's log does not name these files: a missing or
damaged file only means that its turns are generated again.

The first line of a file is the SHA-256 of the other lines, and each other line is one turn as JSON.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import Base64Bytes, TypeAdapter, ValidationError

from rollflow.storage.errors import Corrupt
from rollflow.storage.records import GroupKey, StopReason
from rollflow.storage.token_arrays import Float32s, Int32s

FOLDER = "turns"


@dataclass(frozen=True, slots=True)
class TurnKey:
    """The place of a turn: its group, the number of the episode in the group, and the number of the turn."""

    group: GroupKey
    sample: int
    turn: int


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """A finished turn, which has the T tokens that the policy sampled, their log-probs (nats) and policy versions.

    The field `request` is a hash of the request: of the context and of all else that decides the generation, except for
    the weights. The field `started_version` is the policy version under which the request started.
    """

    key: TurnKey
    request: str
    started_version: int
    ending: StopReason
    tokens: Int32s
    logprobs: Float32s
    versions: Int32s


class _Line(NamedTuple):
    """One line of a file. The token arrays are stored as the bytes of their numbers."""

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


_LINES: TypeAdapter[_Line] = TypeAdapter(_Line)


def turns_path(claim: int, number: int) -> str:
    """Return the path of the file `number` that the scheduler with the claim `claim` writes."""
    return f"{FOLDER}/{claim:010d}-{number:010d}.jsonl"


def encode_turns(turns: Sequence[FinishedTurn]) -> bytes:
    """Return the content of a file with these turns."""
    lines = "".join(map(_encode, turns)).encode()
    return hashlib.sha256(lines).hexdigest().encode() + b"\n" + lines


def decode_turns(data: bytes) -> list[FinishedTurn]:
    """Return the turns of a file.

    Raises:
        Corrupt: the file is damaged.
    """
    sha256, _, lines = data.partition(b"\n")
    if hashlib.sha256(lines).hexdigest().encode() != sha256:
        raise Corrupt("a file of finished turns does not have its SHA-256")
    try:
        return [_decode(_LINES.validate_json(line)) for line in lines.splitlines()]
    except ValidationError as error:
        raise Corrupt(f"a file of finished turns has an invalid line: {error}") from error


def _encode(turn: FinishedTurn) -> str:
    arrays = (base64.b64encode(array.data).decode() for array in (turn.tokens, turn.logprobs, turn.versions))
    key = turn.key
    place = (key.group.prompt, key.group.attempt, key.sample, key.turn)
    return json.dumps([*place, turn.request, turn.started_version, turn.ending, *arrays]) + "\n"


def _decode(line: _Line) -> FinishedTurn:
    key = TurnKey(GroupKey(line.prompt, line.attempt), line.sample, line.turn)
    tokens, logprobs, versions = Int32s(line.tokens), Float32s(line.logprobs), Int32s(line.versions)
    if not len(tokens) == len(logprobs) == len(versions):
        raise Corrupt("a finished turn does not have one log-prob and one version for each token")
    return FinishedTurn(key, line.request, line.started_version, line.ending, tokens, logprobs, versions)
