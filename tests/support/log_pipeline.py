"""The timed pipeline on a run's log: the shipped scheduler and channel, the roles' own logs, faults in the store."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from rollflow.storage.channel import Source
from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.log.batches import BatchLog, verify
from rollflow.storage.log.entries import VersionPublished
from rollflow.storage.log.log import Log
from rollflow.storage.log.state import RunState, Waiting
from rollflow.storage.log.versions import VersionLog
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.records import StoredObject
from rollflow.storage.trajectories import StagedBatch
from rollflow.tasks.rollout.scheduler import Beginning
from tests.support.pipeline import PATIENCE_SECONDS, Damage, Pipeline


class LoggedBatches:
    """`Source` from the log."""

    def __init__(self, store: ObjectStore) -> None:
        self.batches = BatchLog(Log(store))

    async def edition(self, number: int) -> int | None:
        """See `Source`: which entry made it."""
        waiting = self.batches.waiting(number)
        return None if waiting is None else waiting.entry

    async def read(self, number: int) -> object:
        """See `Source`."""
        waiting = self.batches.waiting(number)
        if waiting is None:
            raise Missing(f"batch {number} does not wait any more")
        return self.batches.read(waiting.file)


@dataclass
class LogPipeline(Pipeline):
    """`Pipeline` on a log."""

    @property
    def state(self) -> RunState:
        """What the log says now."""
        self.log.follow()
        return self.log.state

    def _open(self) -> None:
        self.describe()
        self.log = Log(self.store)
        self.log.claim("supervisor")
        self.batch_log, self.version_log = BatchLog(self.log), VersionLog(self.log)
        self.scheduling = Log(self.store).claim("scheduler")
        self.learning = self.log.claim("learner")

    def _newest(self) -> int:
        return self.version_log.newest()

    def _source(self) -> Source[object]:
        return LoggedBatches(self.store)

    def _beginning(self) -> Beginning:
        self.scheduling.log.follow()
        return Beginning.of_state(self.scheduling.log.state)

    def _voided(self) -> int:
        return self.state.voids

    async def _commit(self, staged: StagedBatch) -> None:
        entry, data = BatchLog(self.scheduling.log).commit(self.scheduling, staged)
        times = sum(1 for _ in self.made.setdefault(staged.number, []))
        self.made[staged.number].append(entry.n)
        if (harm := self.damage.get((staged.number, times))) is not None:
            waiting = self.scheduling.log.state.waiting[staged.number]
            damaged(self.store, waiting.file, harm)
        await self.channel.put(staged.number, data, PATIENCE_SECONDS, entry.n)

    def __post_init__(self) -> None:
        self.made: dict[int, list[int]] = {}  # batch -> the entries that made it

    async def _next_batch(self, number: int) -> Waiting:
        while True:
            leased = await self.channel.lease(number, PATIENCE_SECONDS)
            waiting = self.batch_log.waiting(number)
            if waiting is None:
                await asyncio.sleep(0)
                continue
            try:
                verify(waiting.file, leased)  # type: ignore[arg-type]  # the channel's payload is the file's bytes
                self.batch_log.read(waiting.file)
            except Corrupt as error:
                self.batch_log.void(self.learning, number, str(error))
            else:
                return waiting

    def _publish(self, version: int, record: Waiting | None) -> None:
        files = {name: f"{name} {version}".encode() for name in ("weights/model.safetensors", "state/rng.safetensors")}
        weights, state = ((stored,) for stored in self.version_log.stage(self.learning, version, files))
        batch = None if record is None else record.entry
        self.version_log.publish(self.learning, VersionPublished(version, batch, weights, state))
        self.version_log.prune(self.learning)


def damaged(store: ObjectStore, file: StoredObject, how: Damage) -> None:
    """Damage a committed batch as a disk, a person or another program might."""
    data = store.get(file.path)
    if how == "gone":
        store.delete(file.path)
    elif how == "cut":
        store.put(file.path, data[: len(data) // 2])
    else:
        store.put(file.path, data[:99] + bytes([data[99] ^ 1]) + data[100:])
