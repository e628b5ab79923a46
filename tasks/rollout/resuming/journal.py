"""Keeps the finished turns of running episodes in storage, so that an episode survives the death of its scheduler.

    engine --> turn --> journal --+--> file: all that was recorded since the last file, in the background
                                  +--> environment, which acts, may store a snapshot, and asks for the next turn

    after a crash: the environment is restored from its newest snapshot. Without a snapshot, the environment plays the
    episode again from its start. After that point, each stored turn is recalled instead of generated, up to the first
    turn that is not stored.

- A stored turn is used again only for exactly the same request: same context, token limit, stop strings, temperature
  and seed. If an environment answers differently than before the crash, the policy generates the turn again, and the
  reason is stored.
- With `durable_turns = "before-action"`, an environment receives a turn only after the turn is stored, so that no
  action is repeated with another turn.
- With `durable_turns = "background"`, episodes never wait for storage, and a crash loses the newest turns.
- A file is deleted as soon as all its groups of responses are in a batch or discarded.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from rollflow.storage.errors import StoreFailed, Unreachable
from rollflow.storage.records import GroupKey, StopReason
from rollflow.storage.run_records.episode_restarts import EpisodeRestart
from rollflow.storage.run_records.finished_turns import EnvironmentSnapshot, FinishedTurn, Record, TurnKey
from rollflow.tasks.engines.base import GenerationRequest
from rollflow.tasks.rollout.config import SNAPSHOT_BYTES
from rollflow.tasks.rollout.proxy import VersionedGeneration
from rollflow.tasks.rollout.resuming.restore_point import RestorePoint, find_restore_point, recall_turn

WRITE_SECONDS = 0.1  # shortest pause between two writes, in seconds
LONGEST_REASON = 500  # largest number of characters of the stored reason why an episode is generated again
OTHER_REQUEST = "the environment answered differently than before the crash, or the config has changed"

EpisodeKey = tuple[GroupKey, int]  # group, and the number of the episode in the group


class TurnFolder(Protocol):
    """The storage folder to which a journal writes turns."""

    async def write(self, records: Sequence[Record]) -> str:
        """Store turns and snapshots in a new file, and return the file's path.

        Raises:
            StoreFailed, Unreachable: the records are possibly not stored.
        """

    async def note(self, restarts: Sequence[EpisodeRestart]) -> None:
        """Store why episodes could not continue from their stored turns.

        Raises:
            StoreFailed, Unreachable: the records are possibly not stored.
        """

    async def delete(self, path: str) -> None:
        """Delete a file."""


class TurnJournal:
    """The stored turns of one scheduler's episodes. A journal without a folder stores nothing.

    `stored` maps the path of each file of an earlier scheduler to its records, oldest file first. If `waits` is True,
    `record` returns only after the turn is stored.
    """

    def __init__(
        self,
        folder: TurnFolder | None = None,
        stored: Mapping[str, Sequence[Record]] | None = None,
        *,
        waits: bool = False,
        max_snapshot_bytes: int = SNAPSHOT_BYTES,
    ) -> None:
        self._folder, self._waits, self.max_snapshot_bytes = folder, waits, max_snapshot_bytes
        self.recalled = 0  # number of turns that were read from storage instead of generated again
        self.restored = 0  # number of environments that were restored from a snapshot
        self.diverged = 0  # number of turns that were not recalled because the request differs
        self._known: dict[EpisodeKey, dict[int, FinishedTurn]] = {}
        self._files: dict[str, set[GroupKey]] = {}  # path -> groups of the file that have not ended
        self._pending: list[Record] = []
        self._writing: set[GroupKey] = set()  # groups of the file that is being written, which have not ended
        self._restarts: list[EpisodeRestart] = []  # records that are not stored yet
        self._news = asyncio.Event()
        self._written: asyncio.Future[None] | None = None  # done once the pending turns are stored
        self._warns = True  # True until the journal has warned about a snapshot that is too large
        self._points = self._read_stored(stored or {})

    @property
    def is_on(self) -> bool:
        """True if the journal stores turns."""
        return self._folder is not None

    def _read_stored(self, stored: Mapping[str, Sequence[Record]]) -> dict[EpisodeKey, RestorePoint]:
        """Read the stored turns; return the point from which each episode with a snapshot continues."""
        snapshots: dict[EpisodeKey, list[EnvironmentSnapshot]] = {}
        for path, records in stored.items():
            self._files[path] = {record.key.group for record in records}
            for record in records:
                episode = (record.key.group, record.key.sample)
                if isinstance(record, EnvironmentSnapshot):
                    snapshots.setdefault(episode, []).append(record)
                else:
                    self._known.setdefault(episode, {})[record.key.turn] = record
        points = {key: find_restore_point(found, self._known.get(key, {})) for key, found in snapshots.items()}
        return {key: point for key, point in points.items() if point is not None}

    def find_restore_point(self, group: GroupKey, sample: int, basis: str) -> RestorePoint | None:
        """Return the point from which an episode continues after a crash; None if there is no snapshot that fits the
        episode.
        """
        point = self._points.pop((group, sample), None)
        return point if point is not None and point.basis == basis else None

    @property
    def is_empty(self) -> bool:
        """True if the journal has no turn to recall and stores no turns."""
        return self._folder is None and not self._known

    def recall(self, key: TurnKey, request: GenerationRequest) -> VersionedGeneration | None:
        """Return the stored turn of an episode if it answers exactly this request, else None."""
        episode = (key.group, key.sample)
        turn = self._known.get(episode, {}).pop(key.turn, None)
        if turn is None:
            # Later turns are not recalled, because they may have older tokens than the turn that is generated again.
            self._known.pop(episode, None)
            return None
        if turn.request != hash_request(request):
            self.diverged += 1
            self.forget_turns(key, OTHER_REQUEST)
            return None
        self.recalled += 1
        return recall_turn(turn, request.id)

    def forget_turns(self, key: TurnKey, reason: str) -> None:
        """Let the policy generate an episode again from the turn `key` on, and record the reason."""
        self._known.pop((key.group, key.sample), None)
        self.note_restart(key, reason)

    def has_turns(self, group: GroupKey, sample: int) -> bool:
        """Return whether turns of an episode are stored that were not recalled."""
        return bool(self._known.get((group, sample)))

    def note_restart(self, key: TurnKey, reason: str) -> None:
        """Record why an episode does not continue as before the crash."""
        text = "".join(one if one.isprintable() else " " for one in reason[:LONGEST_REASON])
        self._restarts.append(EpisodeRestart(key.group.prompt, key.group.attempt, key.sample, key.turn, text))
        self._news.set()

    async def record(self, key: TurnKey, request: GenerationRequest, made: VersionedGeneration) -> None:
        """Store a finished turn, except an aborted generation.

        Raises:
            StoreFailed, Unreachable: `waits` is True, and the turn cannot be stored.
        """
        generation = made.generation
        if self._folder is None or generation.ending is StopReason.ABORTED:
            return
        self._pending.append(
            FinishedTurn(
                key,
                hash_request(request),
                made.version,
                generation.ending,
                generation.tokens,
                generation.logprobs,
                generation.versions,
            )
        )
        self._news.set()
        if self._waits:
            self._written = self._written or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._written)

    def accepts_size(self, size: int) -> bool:
        """Return whether a snapshot of this size is stored; warn about the first snapshot that is too large."""
        if size > self.max_snapshot_bytes and self._warns:
            self._warns = False
            logging.getLogger(__name__).warning(
                "environment: a snapshot of %d bytes is larger than rollout.max_snapshot_bytes = %d and is not stored, "
                "so after a crash its actions are done again; raise rollout.max_snapshot_bytes",
                size,
                self.max_snapshot_bytes,
            )
        return size <= self.max_snapshot_bytes

    def record_snapshot(self, snapshot: EnvironmentSnapshot) -> None:
        """Store a snapshot of an environment, in the background."""
        if self._folder is not None:
            self._pending.append(snapshot)
            self._news.set()

    async def run(self) -> None:
        """Write the recorded turns to storage, one file after another, until the task is cancelled."""
        try:
            while self._folder is not None:
                await self._news.wait()
                self._news.clear()
                await self._write_pending(self._folder)
                await asyncio.sleep(WRITE_SECONDS)
        finally:
            self._folder = None
            self._finish(self._written)

    async def _write_pending(self, folder: TurnFolder) -> None:
        records, written = self._pending, self._written
        restarts, self._restarts = self._restarts, []
        self._pending, self._written = [], None
        failed: Exception | None = None
        try:
            if records:
                self._writing = {record.key.group for record in records}
                await self._keep_file(folder, await folder.write(records))
        except (StoreFailed, Unreachable) as error:
            failed = error  # callers that wait get this error
        finally:
            self._finish(written, failed)
        if restarts:
            with contextlib.suppress(StoreFailed, Unreachable):  # reasons of restarts are only information for users
                await folder.note(restarts)

    async def _keep_file(self, folder: TurnFolder, path: str) -> None:
        """Remember the unfinished groups of a written file; delete the file if all its groups have ended."""
        if self._writing:
            self._files[path] = self._writing
        else:
            await folder.delete(path)

    def _finish(self, written: asyncio.Future[None] | None, failed: Exception | None = None) -> None:
        if written is None or written.done():
            return
        if failed is None:
            written.set_result(None)
        else:
            written.set_exception(failed)

    async def close_groups(self, groups: Iterable[GroupKey]) -> None:
        """Record that these groups have ended, and delete the files without unfinished groups."""
        ended = set(groups)
        self._pending = [record for record in self._pending if record.key.group not in ended]
        self._writing = self._writing - ended
        for episode in [one for one in self._known.keys() | self._points.keys() if one[0] in ended]:
            self._known.pop(episode, None)
            self._points.pop(episode, None)
        for path, running in list(self._files.items()):
            running -= ended
            if not running and self._folder is not None:
                del self._files[path]
                with contextlib.suppress(StoreFailed, Unreachable):  # on failure, the next scheduler deletes the file
                    await self._folder.delete(path)


def hash_request(request: GenerationRequest) -> str:
    """Return a hash of the inputs of a generation, except for the weights: context, limits and seed."""
    prompt = request.prompt
    options = (request.max_new_tokens, request.temperature, request.seed, request.stop, prompt.placed)
    digest = hashlib.blake2b(repr(options).encode(), digest_size=16)
    digest.update(prompt.flat.data)
    return digest.hexdigest()
