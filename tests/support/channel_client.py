"""A client of the channel's actor, as its own process: `python -m tests.support.channel_client ADDRESS STORE`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray

from rollflow.flows import cluster
from rollflow.storage import ray_channel
from rollflow.storage.errors import Corrupt, Unreachable
from rollflow.storage.objects import ObjectStore, open_store
from rollflow.storage.ray_channel import CHANNEL, RayChannel, start_channel
from rollflow.storage.records import Cursor
from rollflow.storage.trajectories import TrajectoryStore
from tests.storage.test_stores import staged
from tests.support.waiting import HANG_SECONDS


def kill_process() -> None:
    """SIGKILL of the actor's process."""
    actor = ray.get_actor(CHANNEL)
    os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)


def take_its_place(store: ObjectStore, version: int) -> None:
    """What the supervisor does when it finds the actor dead."""
    while True:
        try:
            ray.get(start_channel(store, 2, version).actor.ping.remote(0.0))
            return
        except ray.exceptions.RayActorError:  # its end has not got round yet
            time.sleep(0.1)


async def blocking(function: Any, *arguments: Any, **options: Any) -> Any:
    """A call of the learner's, from a thread of its own."""
    return await asyncio.to_thread(function, *arguments, **options)


async def ordinary(channel: RayChannel, store: ObjectStore) -> None:
    """Bounded, leased, acknowledged, idempotent; payloads large enough for shared memory."""
    _, data = TrajectoryStore(store).commit(staged(0), 0)
    big = pa.py_buffer(bytes(range(256)) * 8192)  # 2 MiB
    await channel.put(0, data, HANG_SECONDS)
    await channel.put(0, data, HANG_SECONDS)
    await channel.put(1, big, HANG_SECONDS)
    with pytest.raises(TimeoutError, match="room for batch 2"):
        await channel.put(2, big, 0.3)
    assert await blocking(channel.lease, 0, HANG_SECONDS) == data
    news = asyncio.create_task(channel.wait_version(0, HANG_SECONDS))
    await blocking(channel.finish, 0, 1)
    assert await news == 1
    assert await channel.waiting() == 1
    with pytest.raises(TimeoutError, match=r"waited 0\.2 s for batch 7"):
        await blocking(channel.lease, 7, 0.2)
    TrajectoryStore(store).commit(replace(staged(1), order=1), 1)
    first, second = await blocking(channel.lease, 1, HANG_SECONDS), await blocking(channel.lease, 1, HANG_SECONDS)
    assert first == big == second
    assert first.address == second.address  # one copy, in shared memory


async def answered_by_the_next(channel: RayChannel, store: ObjectStore) -> None:
    """The actor dies while clients wait for a batch, for room and for news."""
    calls: list[Coroutine[Any, Any, Any]] = [
        blocking(channel.lease, 2, HANG_SECONDS),
        channel.put(5, b"", HANG_SECONDS),
        channel.wait_version(1, HANG_SECONDS),
    ]
    lease, put, news = waiting = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(1)
    assert not any(one.done() for one in waiting)
    kill_process()
    take_its_place(store, 1)
    assert await channel.waiting() == 0
    _, third = TrajectoryStore(store).commit(replace(staged(2), order=2), 2)
    assert await lease == third  # from the store: its put was lost
    for number in range(1, 5):
        await blocking(channel.finish, number, number + 1)
    await put
    assert await news >= 2


async def never_a_voided_one(channel: RayChannel, store: ObjectStore) -> None:
    """What was voided is not handed out again; the next edition is."""
    batches = TrajectoryStore(store)
    record, data = batches.commit(replace(staged(6), order=3), 6)
    await channel.put(6, Path("gone.arrow"), HANG_SECONDS)  # not fatal: it is found in the store
    await channel.put(6, data, HANG_SECONDS)
    assert await blocking(channel.lease, 6, HANG_SECONDS) == data
    store.put(record.file, b"something else")
    with pytest.raises(Corrupt, match=record.file):
        await blocking(channel.lease, 6, HANG_SECONDS, afresh=True)
    batches.void(6, "damaged")
    anew = asyncio.create_task(blocking(channel.lease, 6, HANG_SECONDS))
    await asyncio.sleep(0.5)
    _, other = batches.commit(replace(staged(6), cursor=Cursor((11,), (0,)), edition=1, order=4, voids=1), 6)
    await channel.put(6, other, HANG_SECONDS, edition=1)
    assert await anew == other


async def lost_with_its_owner(channel: RayChannel, store: ObjectStore) -> None:
    """The actor hands out a reference and dies before the bytes are fetched."""
    fetch, seen = ray.get, []

    def get(ref: Any, timeout: float | None = None) -> Any:
        found = fetch(ref, timeout=timeout)
        if not seen:
            seen.append(found)
            kill_process()
            take_its_place(store, 5)
        return found

    expected = TrajectoryStore(store).read(6)[1]
    ray_channel.ray.get = get
    try:
        assert await blocking(channel.lease, 6, HANG_SECONDS) == expected
    finally:
        ray_channel.ray.get = fetch
    assert seen


async def by_the_name_of_its_file(channel: RayChannel, store: ObjectStore) -> None:
    """A file is not copied: who leases it maps it, or gets what the store has if there is no such file here."""
    await blocking(channel.finish, 6, 7)
    batches = TrajectoryStore(store)
    record, data = batches.commit(replace(staged(7), order=5, voids=1), 7)
    file = store.local_path(record.file)
    assert file is not None
    await channel.put(7, file, HANG_SECONDS)
    assert isinstance(await channel.actor.lease.remote(7, HANG_SECONDS, afresh=False), str)
    assert await blocking(channel.lease, 7, HANG_SECONDS) == data
    file.rename(file.with_suffix(".away"))
    with pytest.raises(Corrupt, match=record.file):
        await blocking(channel.lease, 7, HANG_SECONDS)
    file.with_suffix(".away").rename(file)
    assert await blocking(channel.lease, 7, HANG_SECONDS) == data


async def nobody_there(channel: RayChannel) -> None:
    """Nobody takes the dead one's place: the wait ends, in words."""
    ray.kill(ray.get_actor(CHANNEL))
    ray_channel.GRACE_SECONDS = 1.0
    with pytest.raises(Unreachable, match="no channel actor lived to take batch 7 within 2 s"):
        await channel.put(7, b"", 1)


async def main(store: ObjectStore) -> None:
    """All of it, with one channel after the other and one client."""
    channel = start_channel(store, 2, 0)
    await ordinary(channel, store)
    await answered_by_the_next(channel, store)
    await never_a_voided_one(channel, store)
    await lost_with_its_owner(channel, store)
    await by_the_name_of_its_file(channel, store)
    await nobody_there(channel)


if __name__ == "__main__":
    with cluster.attached(sys.argv[1], "test"):
        asyncio.run(main(open_store(sys.argv[2])))
