"""Tests that a real Ray node serves the metrics of vLLM, and that the dashboard uses no metric of vLLM that does not
exist.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_policy import make_policy, make_weights
from tests.support.waiting import RUN_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.xdist_group("vllm")]
BOARD = Path("infra/watching/grafana.json")
SUFFIX = re.compile(r"_(bucket|sum|count)$")

# This code runs in a separate process, because Ray reads the environment when Ray is imported.
SCRAPED = """
import asyncio, os, sys, time, urllib.request
from pathlib import Path
from rollflow.flows.ray_cluster.ray_head import RayHead
from rollflow.flows.ray_cluster import cluster

class Head(RayHead):
    @property
    def node_env(self):
        return {**super().node_env, "RAY_enable_metrics_collection": "1"}

class Engine:
    async def work(self, folder):
        from rollflow.storage.model_input import ModelInput
        from rollflow.tasks.engines import build_engine
        from rollflow.tasks.engines.base import GenerationRequest
        from rollflow.tasks.engines.config import VllmEngineConfig

        self.engine = engine = build_engine(VllmEngineConfig(), folder / "policy", told_as="run-1")
        await engine.start()
        await engine.suspend("continue")
        await engine.update(0, folder / "weights")
        await engine.resume()
        prompt = tuple(range(3, 43))  # longer than a block of the cache
        await engine.logprobs(prompt)
        for round in range(2):
            asked = [GenerationRequest(f"{round}-{n}", ModelInput.of(prompt), 8, seed=n) for n in range(4)]
            await asyncio.gather(*(engine.generate(one) for one in asked))

    async def close(self):
        await self.engine.close()

with Head(Path(sys.argv[1]), cpus=1) as head:
    os.environ.update(head.env)
    with cluster.attached_cluster(head.address, "gauges"):
        import ray

        engine = ray.remote(num_cpus=0)(Engine).remote()
        ray.get(engine.work.remote(Path(sys.argv[2])), timeout=float(sys.argv[3]))
        port = ray.nodes()[0]["MetricsExportPort"]
        limit = time.monotonic() + float(sys.argv[3])
        found = []
        while time.monotonic() < limit:
            page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
            found = [line for line in page.splitlines() if line.startswith("ray_vllm_")]
            if any("inter_token" in line for line in found) and any("cache_hits" in line for line in found):
                break
            time.sleep(1)
        print(*found, sep="\\n")
        ray.get(engine.close.remote(), timeout=float(sys.argv[3]))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Return the run's metrics by name; a metric's value is its sum over all engines and labels."""
    folder = tmp_path_factory.mktemp("engine")
    make_policy(folder / "policy")
    make_weights(folder / "weights", seed=0)
    command = [sys.executable, "-c", SCRAPED, str(folder / "home"), str(folder), str(RUN_SECONDS / 4)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    sums: dict[str, float] = {}
    for line in done.stdout.splitlines():
        if 'model_name="run-1"' in line and 'le="' not in line:
            name = line.partition("{")[0]
            sums[name] = sums.get(name, 0.0) + float(line.split()[-1])
    return sums


def test_ray_node_exports_the_metrics_of_vllm(found: dict[str, float]) -> None:
    assert found["ray_vllm_num_requests_running"] == 0
    tokens = found["ray_vllm_generation_tokens_total"]
    assert 8 <= tokens <= 2 * 4 * 8
    assert found["ray_vllm_time_to_first_token_seconds_count"] == 8
    assert found["ray_vllm_inter_token_latency_seconds_count"] == tokens - 8
    assert 0 < found["ray_vllm_prefix_cache_hits_total"] < found["ray_vllm_prefix_cache_queries_total"]


def test_dashboard_uses_existing_vllm_metrics(found: dict[str, float]) -> None:
    panels = json.loads(BOARD.read_text())["panels"]
    exprs = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {SUFFIX.sub("", name) for expr in exprs for name in re.findall(r"ray_vllm_\w+", expr)}
    assert asked
    assert asked <= {SUFFIX.sub("", name) for name in found}
