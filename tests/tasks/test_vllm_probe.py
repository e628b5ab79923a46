"""vLLM's processes and weights: the probe detects a stale output head, no process outlives its owner, and the death of
vLLM's own process is noticed even while the engine is idle."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from socket import AF_INET

import psutil
import pytest

from rollflow.storage.errors import ConfigError, EngineFailed
from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import StopReason
from rollflow.tasks.actors.engine_client import RayEngine
from rollflow.tasks.engines.base import GenerationRequest, TokenSpan
from rollflow.tasks.engines.config import VllmEngineConfig
from rollflow.tasks.engines.vllm.engine import VllmEngine
from tests.support.cores import TITLE, core, cores
from tests.support.here import Here
from tests.support.tiny_policy import make_policy, make_weights, reference_logprobs
from tests.support.waiting import HANG_SECONDS, soon, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]

PROBE = tuple(range(3, 43))
OWNER = """
import asyncio, os, sys
from pathlib import Path
import psutil
from rollflow.tasks.engines.vllm.engine import VllmEngine
from rollflow.tasks.engines.config import VllmEngineConfig

async def main():
    engine = VllmEngine(VllmEngineConfig(), Path(sys.argv[1]))
    await engine.start()
    print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


async def test_probe_detects_a_stale_tied_head(tmp_path: Path) -> None:
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
    until(lambda: not cores(psutil.Process()))


async def test_death_of_vllms_process_ends_every_wait(tmp_path: Path) -> None:
    """vLLM itself would leave a call waiting whose process dies, for example during a weight update."""
    engine, weights = (
        VllmEngine(VllmEngineConfig(), make_policy(tmp_path / "policy")),
        make_weights(tmp_path / "0", seed=0),
    )
    await engine.start()
    try:
        process = core(psutil.Process())
        process.suspend()
        updating = asyncio.create_task(engine.update(0, weights))
        await asyncio.sleep(0.5)
        assert not updating.done()
        process.kill()
        with pytest.raises(EngineFailed, match="died"):
            await asyncio.wait_for(updating, HANG_SECONDS)
    finally:
        await engine.close()


@pytest.mark.soak
def test_vllm_processes_end_with_a_killed_owner(tmp_path: Path) -> None:
    """No process of the engine outlives its owner, or listens outside of the loopback interface."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    policy = make_policy(tmp_path / "policy")
    # vLLM changes this variable; if it is the first variable, setproctitle sets no title
    environment = {"LD_LIBRARY_PATH": "", **os.environ}
    command = [*_name_host_outside(tmp_path), sys.executable, str(script), str(policy)]
    owner = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    try:
        children = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        assert any(child.name().startswith(TITLE) for child in children)
        opened = [one for child in children for one in child.net_connections("inet") if one.status == "LISTEN"]
        assert opened
        assert [one.laddr for one in opened if not ipaddress.ip_address(one.laddr.ip).is_loopback] == []
    finally:
        os.kill(owner.pid, signal.SIGKILL)
    owner.wait(HANG_SECONDS)
    until(lambda: not any(map(_alive, children)))


def _name_host_outside(folder: Path) -> list[str]:
    """Return a command that starts another one on a host whose name stands for its outside address, as in a cloud.

    Without root, or without such an address, the host keeps its name.
    """
    addresses = [one.address for found in psutil.net_if_addrs().values() for one in found if one.family == AF_INET]
    outside = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    if os.geteuid() != 0 or not outside:
        return []
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{outside[0]} outside\n")
    name = f'mount --bind {folder / "hosts"} /etc/hosts && hostname outside && exec "$@"'
    return ["unshare", "--uts", "--mount", "sh", "-c", name, "sh"]


@pytest.mark.soak
async def test_death_of_vllms_process_reaches_its_actor(tmp_path: Path, ray_node: None) -> None:
    """The actor's requests fail immediately with known tokens, and a new actor of the same name continues them."""
    policy, weights = make_policy(tmp_path / "policy"), make_weights(tmp_path / "0", seed=0)
    engine, processes = await _actor(policy, weights)
    requests = [GenerationRequest(f"r{i}", ModelInput.of((3 + i, 4, 5)), 250) for i in range(32)]
    running = [asyncio.create_task(engine.generate(request)) for request in requests]
    had = await _progress(engine, requests)
    core(processes[0]).kill()
    outcomes = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), HANG_SECONDS)
    failed = [r for r, o in zip(requests, outcomes, strict=True) if isinstance(o, EngineFailed) and r.id in had]
    assert failed, "all ended before the death"
    known = engine.progress({request.id: 0 for request in failed})
    for request in failed:
        assert known[request.id].tokens[: len(had[request.id])] == had[request.id].tokens
    for call in (engine.actor.health.remote(), engine.actor.stats.remote()):
        with pytest.raises(EngineFailed):
            await asyncio.wait_for(call, HANG_SECONDS)
    await engine.close()
    until(lambda: not any(map(_alive, processes)))

    engine, processes = await _actor(policy, weights)
    resumed = [replace(request, prefix=known[request.id]) for request in failed]
    for request, made in zip(resumed, await asyncio.gather(*map(engine.generate, resumed)), strict=True):
        assert made.tokens[: len(request.prefix)] == request.prefix.tokens
        assert made.ending is StopReason.STOP or len(made.tokens) == request.max_new_tokens
        expected = reference_logprobs(weights, request.prompt.tokens + made.tokens)[2:]
        assert made.logprobs == pytest.approx(expected, abs=1e-4)

    core(processes[0]).kill()  # idle
    with pytest.raises(EngineFailed):
        await asyncio.wait_for(_while_healthy(engine), HANG_SECONDS)
    await engine.actor.start.remote()  # starts a new engine in the same actor
    again = RayEngine(engine.actor)
    await again.update(0, Here(weights))
    made = await again.generate(requests[0])
    expected = reference_logprobs(weights, requests[0].prompt.tokens + made.tokens)[2:]
    assert made.logprobs == pytest.approx(expected, abs=1e-4)
    processes = [processes[0], *processes[0].children(recursive=True)]
    assert len(processes) > 1
    os.kill(processes[0].pid, signal.SIGKILL)
    until(lambda: not any(map(_alive, processes)))


async def _actor(policy: Path, weights: Path) -> tuple[RayEngine, list[psutil.Process]]:
    """Start a vLLM engine that serves version 0; return it with its processes, the actor's first."""
    engine = RayEngine.spawn(VllmEngineConfig(), policy, name="engine-0")
    await engine.start()
    await engine.suspend("continue")
    await engine.update(0, Here(weights))
    await engine.resume()
    process = psutil.Process(await engine.actor.__ray_call__.remote(lambda _: os.getpid()))
    return engine, [process, *process.children(recursive=True)]


async def _progress(engine: RayEngine, requests: list[GenerationRequest]) -> dict[str, TokenSpan]:
    """Return the tokens of the first report."""
    ids = {request.id: 0 for request in requests}
    return await soon(lambda: {id: partial for id, partial in engine.progress(ids).items() if partial})


async def _while_healthy(engine: RayEngine) -> None:
    while True:
        await engine.actor.health.remote()


async def test_head_size_without_a_kernel_is_refused_at_start(tmp_path: Path) -> None:
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
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
