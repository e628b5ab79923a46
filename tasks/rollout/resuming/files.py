"""Reads and writes a run's files of finished turns."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.log.state import RunState
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.records import GroupKey
from rollflow.storage.run_records.episode_restarts import EpisodeRestart, store_restarts
from rollflow.storage.run_records.finished_turns import FOLDER, Record, decode_turns, encode_turns, turns_path
from rollflow.tasks.rollout.config import RolloutConfig
from rollflow.tasks.rollout.resuming.journal import TurnFolder, TurnJournal


class TurnFiles(TurnFolder):
    """The files of finished turns that one scheduler process reads and writes."""

    def __init__(self, store: ObjectStore, claim: int) -> None:
        self._store, self._claim = store, claim
        self._numbers, self._notes = itertools.count(), itertools.count()

    def open_journal(self, settings: RolloutConfig, state: RunState, *, has_turns: bool = True) -> TurnJournal:
        """Create the journal of a scheduler that starts from `state`, with the stored turns of unfinished groups.

        Files without an unfinished group are deleted. If `settings` turn off durable turns, or if episodes have a
        single turn, all files are deleted.
        """
        is_on = has_turns and settings.durable_turns != "off"
        stored = {path: self._read_running(path, state) for path in sorted(self._store.list(FOLDER))}
        kept = {path: records for path, records in stored.items() if records and is_on}
        for path in stored.keys() - kept.keys():
            self._store.delete(path)
        if not is_on:
            return TurnJournal()
        waits = settings.durable_turns == "before-action"
        return TurnJournal(self, kept, waits=waits, max_snapshot_bytes=settings.max_snapshot_bytes)

    def _read_running(self, path: str, state: RunState) -> list[Record]:
        """Return the turns and snapshots of a file that belong to unfinished groups."""
        running = set(state.in_flight)

        def is_running(group: GroupKey) -> bool:
            return group in running or not state.cursor.covers(group.prompt)

        try:
            return [record for record in decode_turns(self._store.get(path)) if is_running(record.key.group)]
        except (Corrupt, Missing):
            return []

    async def write(self, records: Sequence[Record]) -> str:
        """Store turns and snapshots, as `TurnFolder.write` specifies."""
        path = turns_path(self._claim, next(self._numbers))
        await asyncio.to_thread(lambda: self._store.create(path, encode_turns(records)))
        return path

    async def note(self, restarts: Sequence[EpisodeRestart]) -> None:
        """Store why episodes did not continue, as `TurnFolder.note` specifies."""
        number = next(self._notes)
        await asyncio.to_thread(store_restarts, self._store, self._claim, number, restarts)

    async def delete(self, path: str) -> None:
        """Delete a file, as `TurnFolder.delete` specifies."""
        await asyncio.to_thread(self._store.delete, path)
