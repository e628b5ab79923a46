"""Tests that a channel in a Ray actor fulfils the contract of `tests/tasks/test_channel.py`, and that its clients
survive the death of the actor.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rollflow.storage.objects import open_store
from tests.support.channel_checks import check_channel

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


async def test_channel_actor_fulfils_the_channels_contract(tmp_path: Path, ray_node: None) -> None:
    await check_channel(open_store(str(tmp_path / "run")))
