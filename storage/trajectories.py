"""Trajectory batches of a run: batch b, once committed, is the batch that trains version b into version b + 1.

A commit writes the Arrow file, then the entry that names it. Before the entry nothing has happened. If a batch's file
is not what was committed, or what it holds is not finite, and no version was trained on it, an entry voids the batch:
its groups are issued again, and the batch is formed anew. So a batch number may be made more than once; the entry that
made it tells them apart. The file of a voided batch stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.log.entries import BatchCommitted, BatchVoided, Body, Entry, Group
from rollflow.storage.log.reading import there
from rollflow.storage.log.run_log import Attached, Log, Writer
from rollflow.storage.log.state import Refused, RunState, Waiting
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.objects.disk import found
from rollflow.storage.records import Discard, FinishedGroup, StoredObject


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """Groups chosen for batch `number`, not yet durable; and what has happened to prompts since the last batch."""

    number: int
    groups: tuple[FinishedGroup, ...]
    issued: tuple[int, ...] = ()  # prompts that were dispatched for the first time, in order
    discards: tuple[Discard, ...] = ()


class TrajectoryStore:
    """Commits, reads and voids the batches of one run. See the module's docstring for the guarantees."""

    def __init__(self, log: Log) -> None:
        self.log, self.store = log, log.store

    def commit(self, writer: Writer, staged: StagedBatch) -> tuple[Entry, Path | pa.Buffer]:
        """Make a staged batch durable; returns its entry, and where its file lies on this machine, or else its bytes.

        Raises:
            Deposed: the run has another scheduler now.
            Refused: the run's state does not allow it; `TooOld` where a group is too old for this batch.
        """
        batch = TrajectoryBatch.from_groups(staged.groups)
        # The name is this call's own: a repeated call must not touch what the first may have committed.
        name = f"{staged.number:08d}-{writer.claim}-{uuid.uuid4().hex[:8]}"
        attached = Attached(f"trajectories/{name}.arrow", batch.to_pieces())
        groups = tuple(committed_group(group) for group in staged.groups)

        def body(state: RunState, file: StoredObject | None) -> Body:
            assert file is not None, "a batch has its file"
            return BatchCommitted(
                number=staged.number,
                file=file,
                rows=len(batch),
                groups=groups,
                issued=staged.issued,
                discards=staged.discards,
                surplus_tokens=sum(group.surplus_tokens for group in staged.groups),
            )

        entry = writer.append(body, attached)
        return entry, self.store.local_path(attached.path) or pa.py_buffer(b"".join(attached.data))

    def waiting(self, number: int) -> Waiting | None:
        """Batch `number`, committed and not trained on; None if there is none. Reads what is new."""
        self.log.follow()
        return self.log.state.waiting.get(number)

    def committed(self, entry: int) -> BatchCommitted:
        """What entry `entry` committed.

        Raises:
            Corrupt: it committed no batch.
        """
        written = self.log.read(entry)
        if written is None or not isinstance(written.entry.body, BatchCommitted):
            raise Corrupt(f"entry {entry} of {self.store.uri} commits no batch")
        return written.entry.body

    def discards(self, entry: int) -> tuple[Discard, ...]:
        """What was discarded while the batch of entry `entry` was formed, and during its earlier makings that were
        voided.

        The list ends early at an entry that cannot be read: nothing is decided by it.

        Raises:
            Corrupt: entry `entry` commits no batch.
        """
        batch = self.committed(entry)
        found = [*batch.discards]
        with contextlib.suppress(Corrupt):
            for n in range(entry - 1, -1 if self.log.state.voids else entry - 1, -1):
                written = there(self.log, n).entry
                if written.batch <= batch.number:  # there was no such batch yet
                    break
                if isinstance(written.body, BatchCommitted) and written.body.number == batch.number:
                    found = [*written.body.discards, *found]
        return tuple(found)

    def read(self, file: StoredObject) -> pa.Buffer:
        """The bytes of a batch's file.

        Raises:
            Corrupt: it is gone, or not what was committed.
        """
        try:
            data = _bytes_of(self.store, file.path)
        except Missing as error:
            raise Corrupt(f"{file.path} is missing") from error
        verify(file, data)
        return data

    def void(self, writer: Writer, number: int, why: str) -> bool:
        """Void batch `number` if its file cannot be read; returns whether the batch is to be formed anew.

        The call may be repeated, by any role that may void. A batch that was trained on or made again meanwhile stays.
        """
        waiting = self.waiting(number)
        if waiting is None or self._is_whole(waiting.file):
            return False
        return self._append(writer, BatchVoided(number, waiting.entry, why))

    def reject(self, writer: Writer, number: int, entry: int, why: str) -> bool:
        """Void batch `number` of entry `entry`: its file is whole, and what it holds, or gives, is not finite.

        Returns whether it was still the one to be trained on.
        """
        return self._append(writer, BatchVoided(number, entry, why, "not-finite"))

    def _append(self, writer: Writer, voided: BatchVoided) -> bool:
        """False if the batch was trained on or made again meanwhile."""
        try:
            writer.append(lambda state, _: voided)
        except Refused:
            if not writer.valid():
                raise
            return False
        return True

    def _is_whole(self, file: StoredObject) -> bool:
        try:
            TrajectoryBatch.from_bytes(self.read(file))
        except Corrupt:
            return False
        return True


def verify(file: StoredObject, data: bytes | pa.Buffer) -> None:
    """Raise `Corrupt` unless `data` is, byte for byte, what was committed."""
    if len(memoryview(data)) != file.size or hashlib.sha256(data).hexdigest() != file.sha256:
        raise Corrupt(f"{file.path} is not what was committed (sha256 or size differs)")


def committed_group(group: FinishedGroup) -> Group:
    """What an entry says of a group."""
    return Group(*group.key, group.started_version, group.newest_version, group.response_tokens)


def _bytes_of(run: ObjectStore, path: str) -> pa.Buffer:
    """An object's bytes: mapped where it lies on this machine, but for an empty one, which cannot be."""
    local = run.local_path(path)
    if local is None or run.stat(path).size == 0:
        return pa.py_buffer(run.get(path))
    with found(local):
        return pa.memory_map(str(local)).read_buffer()
