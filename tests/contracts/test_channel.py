"""A channel in a Ray actor fulfils the contract of `tests/tasks/test_channel.py`; clients outlive the channel."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollflow.flows.ray_cluster.ray_head import RayHead
from tests.support.waiting import RUN_SECONDS

pytestmark = pytest.mark.slow


async def test_channel_actor_fulfils_the_channels_contract(tmp_path: Path) -> None:
    head = RayHead(tmp_path, cpus=1)
    await asyncio.to_thread(head.start)
    try:
        command = [sys.executable, "-m", "tests.support.channel_client", head.address, str(tmp_path / "run")]
        environment = {**os.environ, **head.env, "PYTHONPATH": os.pathsep.join([".dev", "."])}
        await asyncio.to_thread(subprocess.run, command, env=environment, check=True, timeout=RUN_SECONDS)
    finally:
        await asyncio.to_thread(head.stop)
