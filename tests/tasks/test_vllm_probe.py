"""vLLM's processes and weights: a stale output head shows in the probe, and no process outlives its owner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rollflow.storage.errors import ConfigError
from rollflow.tasks.engines.vllm import VllmEngine
from rollflow.tasks.settings import VllmEngineConfig
from tests.support.tiny_policy import make_policy, make_weights, reference_logprobs

pytestmark = pytest.mark.slow

PROBE = tuple(range(3, 43))
OWNER = """
import asyncio, os, sys
from pathlib import Path
import psutil
from rollflow.tasks.engines.vllm import VllmEngine
from rollflow.tasks.settings import VllmEngineConfig

async def main():
    engine = VllmEngine(VllmEngineConfig(), Path(sys.argv[1]))
    await engine.start()
    print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


async def test_the_probe_catches_a_stale_tied_head(tmp_path: Path) -> None:
    engine = VllmEngine(VllmEngineConfig(), make_policy(tmp_path / "policy"), repair_tied_head=False)
    first, second = make_weights(tmp_path / "0", seed=0), make_weights(tmp_path / "1", seed=1)
    await engine.start()
    try:
        await engine.suspend("continue")
        await engine.update(0, first)
        await engine.update(1, second)
        assert _worst(await engine.logprobs(PROBE), second) > 0.1

        engine._repair_tied_head = True
        await engine.update(2, first)
        assert _worst(await engine.logprobs(PROBE), first) < 1e-4
        await engine.resume()
        assert _worst(await engine.logprobs(PROBE), first) < 1e-4
    finally:
        await engine.close()
    assert not [child for child in psutil.Process().children(recursive=True) if "EngineCore" in child.name()]


def test_no_process_outlives_a_killed_owner(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    policy = make_policy(tmp_path / "policy")
    owner = subprocess.Popen([sys.executable, str(script), str(policy)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    try:
        children = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        assert any("EngineCore" in child.name() for child in children)
    finally:
        os.kill(owner.pid, signal.SIGKILL)
    owner.wait(5)
    deadline = time.monotonic() + 3
    while (alive := [child for child in children if _alive(child)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive


async def test_a_head_size_without_a_kernel_is_refused_at_the_start(tmp_path: Path) -> None:
    folder = make_policy(tmp_path / "policy")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"head_dim": 16}))
    with pytest.raises(ConfigError, match="size 16"):
        await VllmEngine(VllmEngineConfig(), folder).start()


def _worst(found: tuple[float, ...] | None, weights: Path) -> float:
    assert found is not None
    return max(abs(a - b) for a, b in zip(found, reference_logprobs(weights, PROBE), strict=True))


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
