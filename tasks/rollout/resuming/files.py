"""Reads and writes a run's files of finished turns."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Literal

from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.log.state import RunState
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.records import GroupKey
from rollflow.storage.run_records.finished_turns import FOLDER, FinishedTurn, decode_turns, encode_turns, turns_path
from rollflow.tasks.rollout.resuming.journal import TurnFolder, TurnJournal


class TurnFiles(TurnFolder):
    """The files of finished turns that one scheduler process reads and writes. The process holds `claim`."""

    def __init__(self, store: ObjectStore, claim: int) -> None:
        self._store, self._claim, self._numbers = store, claim, itertools.count()

    def open_journal(self, mode: Literal["off", "background", "before-action"], state: RunState) -> TurnJournal:
        """Create the journal of a scheduler that starts from `state`, with the stored turns of running groups.

        Files without a running group, and damaged files, are deleted. If `mode` is "off", all files are deleted.
        """
        stored = {path: self._read_running(path, state) for path in self._store.list(FOLDER)}
        kept = {} if mode == "off" else {path: turns for path, turns in stored.items() if turns}
        for path in stored.keys() - kept.keys():
            self._store.delete(path)
        return TurnJournal() if mode == "off" else TurnJournal(self, kept, waits=mode == "before-action")

    def _read_running(self, path: str, state: RunState) -> list[FinishedTurn]:
        """Return a file's turns of groups that are neither in a batch nor discarded."""
        running = set(state.in_flight)

        def is_running(group: GroupKey) -> bool:
            return group in running or not state.cursor.covers(group.prompt)

        try:
            return [turn for turn in decode_turns(self._store.get(path)) if is_running(turn.key.group)]
        except (Corrupt, Missing):
            return []

    async def write(self, turns: Sequence[FinishedTurn]) -> str:
        """Store turns, as `TurnFolder.write` specifies."""
        path = turns_path(self._claim, next(self._numbers))
        await asyncio.to_thread(lambda: self._store.create(path, encode_turns(turns)))
        return path

    async def delete(self, path: str) -> None:
        """Delete a file, as `TurnFolder.delete` specifies."""
        await asyncio.to_thread(self._store.delete, path)
