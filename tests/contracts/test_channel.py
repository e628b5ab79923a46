"""The channel in its Ray actor keeps what `tests/storage/test_channel.py` says of the channel itself."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollflow.flows.ray_head import RayHead

pytestmark = pytest.mark.slow

CLIENT = """
import asyncio, sys, time
import pyarrow as pa, ray
from rollflow.flows import cluster
from rollflow.storage.errors import Unreachable
from rollflow.storage.objects import open_store
from rollflow.storage.ray_channel import RayChannel, start_channel
from rollflow.storage.trajectories import TrajectoryStore
from tests.storage.test_stores import staged

async def main(channel):
    store = open_store(sys.argv[2])
    _, data = TrajectoryStore(store).commit(staged(0), 0)
    big = pa.py_buffer(bytes(range(256)) * 8192)  # 2 MiB: through shared memory
    await channel.put(0, data, 5)
    await channel.put(0, data, 5)
    await channel.put(1, big, 5)
    try:
        await channel.put(2, big, 0.3)
        raise AssertionError("not bounded")
    except TimeoutError as error:
        assert "room for batch 2" in str(error), error
    assert await asyncio.to_thread(channel.lease, 0, 5) == data
    found = await asyncio.to_thread(channel.lease, 1, 5)
    assert found == big and await asyncio.to_thread(channel.lease, 1, 5) == big
    news = asyncio.create_task(channel.wait_version(0, 30))
    await asyncio.to_thread(channel.finish, 0, 1)
    assert await news == 1 and await channel.waiting() == 1
    try:
        await asyncio.to_thread(channel.lease, 7, 0.2)
        raise AssertionError("leased what is not there")
    except TimeoutError as error:
        assert "waited 0.2 s for batch 7" in str(error), error
    ray.kill(channel.actor)
    again = start_channel(store, 2, 1)
    assert await asyncio.to_thread(again.lease, 0, 5) == data  # a lost channel costs a refill
    try:
        await channel.put(3, data, 1)
        raise AssertionError("a dead actor answered")
    except Unreachable as error:
        assert "died while asked to put batch 3" in str(error), error

with cluster.attached(sys.argv[1], "test"):
    asyncio.run(main(start_channel(open_store(sys.argv[2]), 2, 0)))
"""


async def test_the_channel_actor(tmp_path: Path) -> None:
    head = RayHead(tmp_path, cpus=1)
    await asyncio.to_thread(head.start)
    try:
        command = [sys.executable, "-c", CLIENT, head.address, str(tmp_path / "run")]
        environment = {**os.environ, **head.env, "PYTHONPATH": os.pathsep.join([".dev", "."])}
        await asyncio.to_thread(subprocess.run, command, env=environment, check=True, timeout=120)
    finally:
        await asyncio.to_thread(head.stop)
