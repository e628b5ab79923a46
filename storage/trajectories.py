"""Commits, reads and voids (revokes) the trajectory batches of a run. Policy version b is trained on batch b to become
policy version b + 1.

A commit writes the Arrow file first, then the log entry that names the file; without the log entry, the batch does not
exist. A batch is voided if its file is damaged or a value is not finite, but never after a version was trained on it.
The prompts of a voided batch are issued again, and the batch is formed again, so several log entries may commit a batch
of the same number.
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
from rollflow.storage.log.entries import BatchCommitted, BatchVoided, Body, Entry, TrainedGroup
from rollflow.storage.log.reading import get_entry
from rollflow.storage.log.run_log import AttachedObject, Log, Writer
from rollflow.storage.log.state import CommittedBatch, EntryRefused, RunState
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.objects.disk import raise_missing
from rollflow.storage.records import Discard, FinishedGroup, GroupKey, PassRate, StoredObject, UnjudgedResponse


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """Batch `number` before the batch is committed: its groups, and the prompts that were issued or discarded since the
    last commit.
    """

    number: int
    groups: tuple[FinishedGroup, ...]
    issued: tuple[int, ...] = ()  # prompts that were sent to the engines for the first time, in this order
    discards: tuple[Discard, ...] = ()
    filtered_rates: tuple[PassRate, ...] = ()  # pass rates of the groups in `discards` that the run's filter removed
    unjudged: tuple[UnjudgedResponse, ...] = ()  # responses of the groups in `discards` that nobody could judge

    @property
    def ended_groups(self) -> list[GroupKey]:
        """The keys of all groups that are trained on or discarded with this batch."""
        return [*(group.key for group in self.groups), *(discard.key for discard in self.discards)]


class TrajectoryStore:
    """Commits, reads and voids the trajectory batches of one run, as the module's docstring describes."""

    def __init__(self, log: Log) -> None:
        self.log, self.store = log, log.store

    def commit(self, writer: Writer, staged: StagedBatch) -> tuple[Entry, Path | pa.Buffer]:
        """Commit a staged batch durably; return the batch's log entry, and the path of the batch file. If the store is
        remote, return the bytes of the batch in place of the path.

        Raises:
            Deposed: another process is the run's scheduler now.
            EntryRefused: the run's state does not allow the commit. The subclass `GroupTooOld` is raised if a group is
                too old for the batch.
        """
        batch = TrajectoryBatch.from_groups(staged.groups)
        # each commit uses a new file name, so that a repeated commit cannot overwrite the file of the first commit
        name = f"{staged.number:08d}-{writer.claim}-{uuid.uuid4().hex[:8]}"
        attached = AttachedObject(f"trajectories/{name}.arrow", batch.to_pieces())
        groups = tuple(committed_group(group) for group in staged.groups)

        def body(state: RunState, file: StoredObject | None) -> Body:
            assert file is not None, "a committed batch must have a file"
            return BatchCommitted(
                number=staged.number,
                file=file,
                rows=batch.episodes,
                groups=groups,
                issued=staged.issued,
                discards=staged.discards,
                surplus_tokens=sum(group.surplus_tokens for group in staged.groups),
                rates=committed_rates(staged),
                unjudged=(*staged.unjudged, *(one for group in staged.groups for one in group.left_out)),
            )

        entry = writer.append(body, attached)
        return entry, self.store.local_path(attached.path) or pa.py_buffer(b"".join(attached.data))

    def find_waiting(self, number: int) -> CommittedBatch | None:
        """Read new log entries, and return batch `number` if the batch is committed and not trained on, else None."""
        self.log.follow()
        return self.log.state.waiting.get(number)

    def read_commit(self, entry: int) -> BatchCommitted:
        """Return the batch that log entry `entry` committed.

        Raises:
            Corrupt: the log entry does not commit a batch.
        """
        written = self.log.read(entry)
        if written is None or not isinstance(written.entry.body, BatchCommitted):
            raise Corrupt(f"log entry {entry} of {self.store.uri} should commit a batch, but records something else")
        return written.entry.body

    def discards(self, entry: int) -> tuple[Discard, ...]:
        """List the groups that were discarded while the batch of log entry `entry` was formed.

        If earlier commits of the batch were voided, the list includes the groups that were discarded before those
        commits.

        The list is incomplete if a log entry cannot be read, and is used only for metrics and display.

        Raises:
            Corrupt: log entry `entry` does not commit a batch.
        """
        batch = self.read_commit(entry)
        found = [*batch.discards]
        with contextlib.suppress(Corrupt):
            for n in range(entry - 1, -1 if self.log.state.voids else entry - 1, -1):
                written = get_entry(self.log, n).entry
                if written.batch <= batch.number:  # no log entry before this one commits the batch
                    break
                if isinstance(written.body, BatchCommitted) and written.body.number == batch.number:
                    found = [*written.body.discards, *found]
        return tuple(found)

    def read(self, file: StoredObject) -> pa.Buffer:
        """Read the file of a batch.

        Raises:
            Corrupt: the batch's file is missing, or its hash differs from the hash in the log entry.
        """
        try:
            data = _bytes_of(self.store, file.path)
        except Missing as error:
            raise Corrupt(f"the object {file.path} is missing") from error
        verify(file, data)
        return data

    def void(self, writer: Writer, number: int, why: str) -> bool:
        """Void batch `number` if the batch's file cannot be read; return whether the batch must be formed again.

        A batch that was trained on or formed again meanwhile is not voided.
        """
        waiting = self.find_waiting(number)
        if waiting is None or self._is_whole(waiting.file):
            return False
        return self._append(writer, BatchVoided(number, waiting.entry, why))

    def reject(self, writer: Writer, number: int, entry: int, why: str) -> bool:
        """Void the batch `number` that log entry `entry` committed, because a value in the batch or computed from the
        batch is not finite.

        Return False, and void nothing, if the batch was trained on or formed again meanwhile.
        """
        return self._append(writer, BatchVoided(number, entry, why, "not-finite"))

    def _append(self, writer: Writer, voided: BatchVoided) -> bool:
        """Append the log entry that voids a batch; return False if the batch was trained on or formed again
        meanwhile."""
        try:
            writer.append(lambda state, _: voided)
        except EntryRefused:
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
    """Raise `Corrupt` unless `data` has the size and sha256 that the log records."""
    if len(memoryview(data)) != file.size or hashlib.sha256(data).hexdigest() != file.sha256:
        raise Corrupt(
            f"{file.path} does not have the content that its log entry names (the sha256 or the size differs)"
        )


def committed_group(group: FinishedGroup) -> TrainedGroup:
    """Return the record of a trajectory group that is written to the log entry of the group's batch."""
    return TrainedGroup(*group.key, group.started_version, group.newest_version, group.response_tokens)


def committed_rates(staged: StagedBatch) -> tuple[PassRate, ...]:
    """Return the known pass rates that are written to the log entry of a batch."""
    rates = (group.pass_rate for group in staged.groups)
    return (*staged.filtered_rates, *(rate for rate in rates if rate is not None))


def _bytes_of(run: ObjectStore, path: str) -> pa.Buffer:
    """Return the bytes of a stored object; a local file is memory-mapped unless the file is empty."""
    local = run.local_path(path)
    if local is None or run.stat(path).size == 0:
        return pa.py_buffer(run.get(path))
    with raise_missing(local):
        return pa.memory_map(str(local)).read_buffer()
