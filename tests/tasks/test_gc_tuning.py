"""Tests that the settings of Python's garbage collector hold in the actors that handle every response."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from rollflow.tasks.actors.engine_client import RayEngine
from rollflow.tasks.actors.reward import RewardActor
from rollflow.tasks.actors.rollout import RolloutActor
from rollflow.tasks.engines.config import VllmEngineConfig
from rollflow.tasks.runtime.gc_tuning import OLDER, YOUNG, pause_collector
from tests.support.small_run import prepare_small
from tests.support.tiny_policy import make_policy
from tests.support.waiting import HANG_SECONDS

IMPORTED = 20_000  # least number of frozen objects after all imports


def test_garbage_collector_is_paused_only_inside_the_block() -> None:
    with pause_collector():
        paused = not gc.isenabled()
    assert paused
    assert gc.isenabled()


async def settings(actor: Any) -> tuple[tuple[int, int, int], int]:
    """Return the garbage collector's thresholds in an actor's process, and the number of frozen objects."""
    found: tuple[tuple[int, int, int], int] = await actor.__ray_call__.remote(
        lambda _: (gc.get_threshold(), gc.get_freeze_count())
    )
    return found


async def spares_the_collector(actor: Any) -> None:
    """Wait until the actor's process has the tuned thresholds, and check that it has frozen objects."""
    async with asyncio.timeout(HANG_SECONDS):
        while (await settings(actor))[0] != (YOUNG, OLDER, OLDER):
            await asyncio.sleep(0.1)
    assert (await settings(actor))[1] > IMPORTED


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("kind", [RewardActor, RolloutActor])
async def test_actors_run_with_a_tuned_garbage_collector(
    ray_node: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Callable[..., object]
) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    context = prepare_small(tmp_path)
    context.log.claim("supervisor")
    arguments = (context, "") if kind is RolloutActor else (context,)
    actor = ray.remote(kind).options(num_cpus=0, max_concurrency=16).remote(*arguments)
    try:
        await actor.status.remote()
        assert (await settings(actor))[0] != (YOUNG, OLDER, OLDER)
        running = actor.run.remote()
        await spares_the_collector(actor)
        assert ray.wait([running], timeout=0)[1], "it has ended"
    finally:
        ray.kill(actor)


@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
@pytest.mark.soak
async def test_vllm_engine_runs_with_a_tuned_garbage_collector(ray_node: None, tmp_path: Path) -> None:
    """The process of the engine's actor freezes the objects that it creates when it imports vLLM."""
    engine = RayEngine.spawn(VllmEngineConfig(), make_policy(tmp_path / "policy"))
    try:
        await engine.start()
        await spares_the_collector(engine.actor)
    finally:
        await engine.close()
