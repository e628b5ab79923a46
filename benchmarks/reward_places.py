"""Measures scores per second with one and with two reward actors, on a Ray cluster of two nodes on this machine.

The scorer sleeps, so that the measurement needs few CPUs. All responses are requested at once, through the client that
the scheduler uses. This module is a part of `benchmarks.rewards`, which runs it in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import Row, at_least
from rollflow.tasks.scorers.base import Score

RESPONSES = 960
SLEEP = 0.1  # seconds that the scorer takes for a response
WORKERS = 8  # worker processes of each reward actor
TARGET = 1.8  # target: smallest ratio of the scores per second of two reward actors to those of one
LONGEST_SECONDS = 900.0


def sleep_score(response: str, reference: Mapping[str, Any]) -> Score:
    """Score a response after `SLEEP` seconds."""
    time.sleep(reference["seconds"])
    return Score(1.0)


def measure_places() -> Iterator[Row]:
    """Measure one run with one reward actor and one with two."""
    root = Path(__file__).resolve().parent.parent
    path = os.pathsep.join([str(root / ".dev"), str(root)])
    given = json.dumps([RESPONSES, SLEEP, WORKERS])
    with tempfile.TemporaryDirectory() as home:
        subprocess.run(
            [sys.executable, "-m", "benchmarks.reward_places", home, given],
            cwd=root,
            env={**os.environ, "PYTHONPATH": path, "ROLLFLOW_HOME": home},
            stdout=subprocess.DEVNULL,
            timeout=LONGEST_SECONDS,
            check=True,
        )
        one, two = json.loads((Path(home) / "rates.json").read_text())
    case = f"scores of {SLEEP:g} s, {WORKERS} workers each"
    yield Row(case, "one reward actor (scores/s)", one)
    yield Row(case, "two reward actors (scores/s)", two)
    yield at_least(case, "two over one", two / one, TARGET)


def start_actors(folder: Path, actors: int) -> None:
    """Start a run's reward actor, and wait until this number of reward actors scores."""
    import ray

    from rollflow.tasks.actors.reward import start_reward
    from rollflow.tasks.run.context import RunContext

    actor = start_reward(RunContext(str(folder), folder.parent / "cache"))
    actor.run.remote()
    while ray.get(actor.status.remote()).actors < actors:
        time.sleep(0.1)


async def score_all(actors: int, responses: int, seconds: float, workers: int) -> float:
    """Return the scores per second of this number of reward actors."""
    from rollflow.tasks.actors.reward import RewardClient
    from rollflow.tasks.scorers.base import ScoreRequest

    client = RewardClient(LONGEST_SECONDS)
    asked = [ScoreRequest([1], {"seconds": seconds}) for _ in range(responses)]
    warm = asked[: 8 * actors * workers]  # after these responses, all worker processes have started
    await asyncio.gather(*(client.score(request) for request in warm))
    began = time.monotonic()
    await asyncio.gather(*(client.score(request) for request in asked))
    return responses / (time.monotonic() - began)


def prepare(folder: Path, actors: int, workers: int) -> None:
    """Create a run whose scorer is `sleep_score`."""
    from rollflow.storage.log.entries import RunCreated
    from rollflow.storage.log.run_log import Log
    from rollflow.storage.objects import open_store
    from rollflow.tasks.policies.config import ColdStart
    from rollflow.tasks.policies.folder import build_cold_folder
    from rollflow.tasks.run.cluster_config import ClusterConfig, RewardActorsConfig
    from rollflow.tasks.run.config import RunConfig
    from rollflow.tasks.run.context import FORMAT
    from rollflow.tasks.scorers.config import ImportReward

    reward = ImportReward(path="benchmarks.reward_places:sleep_score", workers=workers)
    cluster = ClusterConfig(reward_actors=RewardActorsConfig(min=actors), lease_seconds=0)
    config, store = RunConfig(reward=reward, cluster=cluster), open_store(str(folder))
    tree = config.model_dump(mode="json")
    Log(store).create(RunCreated(folder.name, tree, config.sha256(), len(config.prompts), format=FORMAT))
    for name, data in build_cold_folder(ColdStart(), ["1"]).items():
        store.put(f"policy/{name}", data)


def main() -> None:
    home, (responses, seconds, workers) = Path(sys.argv[1]), json.loads(sys.argv[2])
    from rollflow.flows.ray_cluster.ray_head import RayHead, RayNode

    head = RayHead(home / "ray", cpus=2)
    os.environ.update(head.env)  # Ray reads the cluster's token when it is imported
    from rollflow.flows.ray_cluster import cluster
    from rollflow.tasks.actors.reward import REWARD

    rates = []
    with head, RayNode(head, cpus=2):
        for actors in (1, 2):
            prepare(home / f"run-{actors}", actors, workers)
            with cluster.attached_cluster(head.address, f"places-{actors}"):
                start_actors(home / f"run-{actors}", actors)
                rates.append(asyncio.run(score_all(actors, responses, seconds, workers)))
                cluster.kill_named([REWARD])
    (home / "rates.json").write_text(json.dumps(rates))


if __name__ == "__main__":
    main()
