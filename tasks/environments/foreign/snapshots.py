"""Stores the state of an environment that runs in a worker process, so that its episode continues after a crash.

A stored snapshot is a line of JSON, followed by bytes that only the environment interprets.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from rollflow.tasks.environments.base import Episode, SnapshotRejected
from rollflow.tasks.environments.foreign.world import World

NO_REPLAY = "the environment cannot repeat its actions, and stored no snapshot"


async def save_snapshot(episode: Episode, world: World, total: float) -> None:
    """Store the environment's state and the rewards so far, if the run keeps snapshots and the environment supports
    them."""
    if not (episode.keeps_snapshots and world.described.get("has_snapshots")):
        return
    if (fields := await world.take_snapshot()) is not None:
        episode.save_snapshot(pack_snapshot({**fields, "total": total}))


async def restore_world(episode: Episode, world: World) -> float | None:
    """Restore the environment of an episode that continues after a crash; return the rewards so far. The result is None
    if the episode must begin again.

    Raises:
        SnapshotRejected: the environment cannot be restored.
    """
    if episode.snapshot is None:
        if world.described.get("can_replay") is False:
            episode.forget_turns(NO_REPLAY)
        return None
    try:
        fields = unpack_snapshot(episode.snapshot)
        total = float(fields.pop("total"))
    except (ValueError, TypeError, KeyError) as error:
        raise SnapshotRejected(f"the snapshot of the environment cannot be read ({error})") from error
    await world.restore(fields)
    return total


def pack_snapshot(fields: Mapping[str, Any]) -> bytes:
    """Return a snapshot with these fields; the field `data` is encoded in Base64."""
    others = {name: value for name, value in fields.items() if name != "data"}
    return json.dumps(others).encode() + b"\n" + base64.b64decode(fields["data"])


def unpack_snapshot(snapshot: bytes) -> dict[str, Any]:
    """Return the fields of a snapshot; the field `data` is encoded in Base64.

    Raises:
        ValueError: the snapshot is damaged.
    """
    line, _, data = snapshot.partition(b"\n")
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("the snapshot does not begin with a JSON object")
    return {**fields, "data": base64.b64encode(data).decode()}
