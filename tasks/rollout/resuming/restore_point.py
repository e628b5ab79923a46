"""Finds the point at which an episode continues after a crash: the newest usable snapshot of its environment.

    turn 0, events, snapshot 0 <-- turn 1, events, snapshot 1 <-- ...

Each snapshot stores the digests of the previous snapshot and of the turns since then, so that a snapshot is used only
with the history that led to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rollflow.storage.run_records.finished_turns import EnvironmentSnapshot, EpisodeEvent, FinishedTurn
from rollflow.tasks.engines.base import Generation, TokenSpan
from rollflow.tasks.rollout.proxy import VersionedGeneration


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """The newest usable snapshot of an episode, with all earlier events.

    An event "turn" has the generation of the turn as its value.
    """

    basis: str
    number: int
    digest: str
    events: tuple[EpisodeEvent, ...]
    data: bytes


def find_restore_point(
    snapshots: Iterable[EnvironmentSnapshot], turns: Mapping[int, FinishedTurn]
) -> RestorePoint | None:
    """Return the newest snapshot of an episode for which all earlier snapshots and turns are stored and match.

    If several snapshots have the same number, only the last of them is used. `turns` maps the number of each stored
    turn to the turn.
    """
    numbered = {one.number: one for one in snapshots}
    found: RestorePoint | None = None
    for number in range(len(numbered)):
        one = numbered.get(number)
        if one is None or not _follows(one, found):
            return found
        events = _fill_turns(one, found, turns)
        if events is None:
            return found
        found = RestorePoint(one.basis, number, one.digest, events, one.data)
    return found


def _follows(snapshot: EnvironmentSnapshot, before: RestorePoint | None) -> bool:
    if before is None:
        return not snapshot.parent
    return snapshot.parent == before.digest and snapshot.basis == before.basis


def _fill_turns(
    snapshot: EnvironmentSnapshot, before: RestorePoint | None, turns: Mapping[int, FinishedTurn]
) -> tuple[EpisodeEvent, ...] | None:
    """Return all events up to the snapshot, with the generations of the turns; None if a generation is missing."""
    events = list(before.events) if before else []
    count = sum(event.kind == "turn" for event in events)
    for event in snapshot.events:
        if event.kind == "turn":
            turn = turns.get(count)
            if turn is None or turn.digest != event.value:
                return None
            event, count = EpisodeEvent("turn", recall_turn(turn)), count + 1
        events.append(event)
    return tuple(events) if count == snapshot.key.turn else None


def recall_turn(turn: FinishedTurn, id: str = "") -> VersionedGeneration:
    """Return a stored turn as a generation that answers the request `id`."""
    span = TokenSpan(turn.tokens, turn.logprobs, turn.versions)
    return VersionedGeneration(Generation(id, span, turn.ending), turn.started_version, is_recalled=True)
