"""Checks the channel (the Ray actor that passes batches to the learner), by a client in a process that is attached to a
Ray node.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray

from rollflow.storage.errors import Corrupt, Unreachable
from rollflow.storage.log.run_log import Writer
from rollflow.storage.objects import ObjectStore
from rollflow.storage.trajectories import TrajectoryStore
from rollflow.tasks.actors import channel as ray_channel
from rollflow.tasks.actors.channel import CHANNEL, RayChannel, start_channel
from tests.support.batches import file_of, ready, staged
from tests.support.waiting import HANG_SECONDS


def kill_process() -> None:
    """Kill the actor's process with SIGKILL."""
    actor = ray.get_actor(CHANNEL)
    os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)


def take_its_place(store: ObjectStore, version: int) -> None:
    """Start a new actor, as the supervisor does when it finds that the actor is dead."""
    while True:
        try:
            ray.get(start_channel(store, 2, version).actor.ping.remote(0.0))
            return
        except ray.exceptions.RayActorError:  # Ray has not noticed the actor's death yet
            time.sleep(0.1)


async def blocking(function: Any, *arguments: Any, **options: Any) -> Any:
    """Call a blocking method of the learner, in a thread."""
    return await asyncio.to_thread(function, *arguments, **options)


@dataclass(frozen=True)
class Scheduler:
    """Commits batches of a run whose staleness bound is so large that no batch waits for a version."""

    store: ObjectStore
    batches: TrajectoryStore
    writer: Writer

    def commit(self, number: int, attempt: int = 0) -> tuple[int, pa.Buffer]:
        """Commit batch `number`; return its entry and its bytes."""
        entry, _ = self.batches.commit(self.writer, staged(number, attempt=attempt))
        return entry.n, self.batches.read(file_of(self.batches, number))


async def ordinary(channel: RayChannel, scheduler: Scheduler) -> None:
    """Check that calls are bounded in time, leased, acknowledged and idempotent. Payloads are large enough for shared
    memory.
    """
    entry, data = scheduler.commit(0)
    following, _ = scheduler.commit(1)
    big = pa.py_buffer(bytes(range(256)) * 8192)  # 2 MiB
    await channel.put(0, data, HANG_SECONDS, entry)
    await channel.put(0, data, HANG_SECONDS, entry)
    await channel.put(1, big, HANG_SECONDS, following)
    with pytest.raises(TimeoutError, match="room for batch 2"):
        await channel.put(2, big, 0.3)
    assert await blocking(channel.lease, 0, HANG_SECONDS) == data
    news = asyncio.create_task(channel.wait_version(0, HANG_SECONDS))
    await blocking(channel.finish, 0, 1)
    assert await news == 1
    assert await channel.count_waiting() == 1
    with pytest.raises(TimeoutError, match=r"batch 7 did not come from the rollout stage within 0\.2 s"):
        await blocking(channel.lease, 7, 0.2)
    first, second = await blocking(channel.lease, 1, HANG_SECONDS), await blocking(channel.lease, 1, HANG_SECONDS)
    assert first == big == second
    assert first.address == second.address  # both reads share one copy in shared memory


async def answered_by_the_next(channel: RayChannel, scheduler: Scheduler) -> None:
    """Check that calls are answered by the next actor if the actor dies while clients wait for a batch, for room and
    for news.
    """
    calls: list[Coroutine[Any, Any, Any]] = [
        blocking(channel.lease, 2, HANG_SECONDS),
        channel.put(5, b"", HANG_SECONDS),
        channel.wait_version(1, HANG_SECONDS),
    ]
    lease, put, news = waiting = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(1)
    assert not any(one.done() for one in waiting)
    kill_process()
    take_its_place(scheduler.store, 1)
    assert await channel.count_waiting() == 0
    _, third = scheduler.commit(2)
    assert await lease == third  # this batch is read from the store, because its put was lost
    for number in range(1, 5):
        await blocking(channel.finish, number, number + 1)
    await put
    assert await news >= 2


async def never_a_voided_one(channel: RayChannel, scheduler: Scheduler) -> None:
    """Check that a voided batch is not leased again, but that the batch that was committed in its place is leased."""
    entry, data = [scheduler.commit(number) for number in range(3, 7)][-1]
    await channel.put(6, Path("gone.arrow"), HANG_SECONDS, entry)  # the missing file is found in the store
    await channel.put(6, data, HANG_SECONDS, entry)
    assert await blocking(channel.lease, 6, HANG_SECONDS) == data
    file = file_of(scheduler.batches, 6)
    scheduler.store.put(file.path, b"something else")
    with pytest.raises(Corrupt, match=file.path):
        await blocking(channel.lease, 6, HANG_SECONDS, afresh=True)
    assert scheduler.batches.void(scheduler.writer, 6, "damaged")
    anew = asyncio.create_task(blocking(channel.lease, 6, HANG_SECONDS))
    await asyncio.sleep(0.5)
    entry, other = scheduler.commit(6, attempt=1)
    await channel.put(6, other, HANG_SECONDS, entry)
    assert await anew == other


async def lost_with_its_owner(channel: RayChannel, scheduler: Scheduler) -> None:
    """Check the case that the actor hands out a reference to a batch, and dies before the bytes are fetched."""
    fetch, seen = ray.get, []

    def get(ref: Any, timeout: float | None = None) -> Any:
        found = fetch(ref, timeout=timeout)
        if not seen:
            seen.append(found)
            kill_process()
            take_its_place(scheduler.store, 5)
        return found

    expected = scheduler.batches.read(file_of(scheduler.batches, 6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_channel.ray, "get", get)
        assert await blocking(channel.lease, 6, HANG_SECONDS) == expected
    assert seen


async def by_the_name_of_its_file(channel: RayChannel, scheduler: Scheduler) -> None:
    """Check that a batch's file is not copied: the client maps the file, or reads the batch from the store if the file
    does not exist on its machine.
    """
    await blocking(channel.finish, 6, 7)
    entry, data = scheduler.commit(7)
    path = file_of(scheduler.batches, 7).path
    file = scheduler.store.local_path(path)
    assert file is not None
    await channel.put(7, file, HANG_SECONDS, entry)
    assert isinstance(await channel.actor.lease.remote(7, HANG_SECONDS, afresh=False), str)
    assert await blocking(channel.lease, 7, HANG_SECONDS) == data
    file.rename(file.with_suffix(".away"))
    with pytest.raises(Corrupt, match=path):
        await blocking(channel.lease, 7, HANG_SECONDS)
    file.with_suffix(".away").rename(file)
    assert await blocking(channel.lease, 7, HANG_SECONDS) == data


async def nobody_there(channel: RayChannel) -> None:
    """Check that a wait ends with a clear error if no actor replaces the dead one."""
    actor = ray.get_actor(CHANNEL)
    ray.kill(actor)
    # a kill is asynchronous, so the dying actor may still accept a batch
    with contextlib.suppress(ray.exceptions.RayActorError):
        async with asyncio.timeout(HANG_SECONDS):
            while True:
                await actor.ping.remote(0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_channel, "GRACE_SECONDS", 1.0)
        with pytest.raises(Unreachable, match="no channel actor was running that could take batch 7 within 2 s"):
            await channel.put(7, b"", 1)


async def check_channel(store: ObjectStore) -> None:
    """Run all checks, with one client and one channel after another."""
    scheduler = Scheduler(store, *ready(store, async_ratio=9))
    channel = start_channel(store, 2, 0)
    await ordinary(channel, scheduler)
    await answered_by_the_next(channel, scheduler)
    await never_a_voided_one(channel, scheduler)
    await lost_with_its_owner(channel, scheduler)
    await by_the_name_of_its_file(channel, scheduler)
    await nobody_there(channel)
