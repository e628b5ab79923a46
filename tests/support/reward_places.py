"""Scores responses on a Ray cluster, loses a node, a helper (further reward actor) or the reward actor, and writes what
happened.

`python -m tests.support.reward_places nodes FOLDER` loses one of two nodes, and then the reward actor. `python -m
tests.support.reward_places programs FOLDER` runs programs in sandboxes. The queue of programs starts a helper, which is
killed and started again.

The result is `FOLDER/found.json`. The script runs in a separate process, because Ray reads the token of a cluster when
Ray is first imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer

from rollflow.flows.ray_cluster.ray_head import RayHead, RayNode
from rollflow.storage.records import Outcome
from rollflow.tasks.run.cluster_config import RewardActorsConfig
from rollflow.tasks.scorers.base import Score, ScoreRequest
from rollflow.tasks.scorers.config import CodeReward, ImportReward, RewardConfig

WAIT_SECONDS = 180.0
QUICK, SLOW = "print(7)", "import time\ntime.sleep(6)\nprint(7)"
CASES = {"cases": [{"stdin": "", "stdout": "7"}]}
PROGRAMS = 20
SANDBOXED = 3  # processes of a helper that runs a program: the actor's, a worker's, and at least one of the sandbox
CONFIGS: dict[str, tuple[RewardConfig, RewardActorsConfig]] = {
    "nodes": (
        ImportReward(path="tests.support.reward_places:score_when", workers=2, deadline_seconds=WAIT_SECONDS),
        RewardActorsConfig(min=2),
    ),
    "programs": (
        CodeReward(case_seconds=60.0, deadline_seconds=WAIT_SECONDS, fenced=False, at_once=1),
        RewardActorsConfig(max=2, grow_seconds=1.0, idle_seconds=3.0),
    ),
}


def score_when(response: str, reference: Mapping[str, Any]) -> Score:
    """Wait until a file exists, and return a score whose reason names the process of the actor and that of the
    worker.
    """
    while not os.path.exists(reference["until"]):
        time.sleep(0.01)
    return Score(float(reference["number"]), f"{os.getppid()} {os.getpid()}")


async def wait_until(true: Any) -> None:
    """Wait until an asynchronous function returns a true value."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not await true():
            await asyncio.sleep(0.1)


class Scoring:
    """A reward actor with one helper, and the scores that it returned."""

    def __init__(self, folder: Path) -> None:
        from rollflow.tasks.actors.reward import RewardClient
        from rollflow.tasks.run.context import RunContext

        self.folder, self.context = folder, RunContext(str(folder / "run"), folder / "cache")
        self.client = RewardClient(WAIT_SECONDS)
        self.numbers, self.actor, self.running = 0, None, None

    def start(self) -> None:
        """Start the reward actor, or its successor."""
        from rollflow.tasks.actors.reward import start_reward

        actor: Any = start_reward(self.context)
        self.actor, self.running = actor, actor.run.remote()

    async def count_actors(self) -> int:
        """Return the number of actors in the status."""
        actor: Any = self.actor
        return int((await actor.status.remote()).actors)

    async def await_actors(self, count: int) -> None:
        """Wait until this number of actors scores."""

        async def has_count() -> bool:
            return await self.count_actors() == count

        await wait_until(has_count)

    async def await_status(self, true: Callable[[Any], bool]) -> Any:
        """Wait until a function of the status is true, and return the status."""
        actor: Any = self.actor
        async with asyncio.timeout(WAIT_SECONDS):
            while not true(status := await actor.status.remote()):
                await asyncio.sleep(0.1)
        return status

    def ask(self, count: int, until: Path) -> list[asyncio.Future[Score]]:
        """Ask for the scores of further responses. Scoring waits until a file exists."""
        numbers = range(self.numbers, self.numbers + count)
        self.numbers += count
        found = [ScoreRequest([1], {"until": str(until), "number": number}) for number in numbers]
        return [asyncio.ensure_future(self.client.score(request)) for request in found]

    async def take(self, waiting: Sequence[asyncio.Future[Score]]) -> Counter[int]:
        """Return the number of responses that each actor process has scored, and check that each response has its own
        score.
        """
        async with asyncio.timeout(WAIT_SECONDS):
            scores = await asyncio.gather(*waiting)
        values = [int(score.value) for score in scores]
        assert values == list(range(values[0], values[0] + len(waiting))), values
        return Counter(int(score.reason.split()[0]) for score in scores)


def find_workers(actor: int) -> list[psutil.Process]:
    """Return the process of an actor with its worker processes."""
    process = psutil.Process(actor)
    return [process, *process.children(recursive=True)]


async def await_end(processes: Sequence[psutil.Process]) -> bool:
    """Wait until processes have ended; return whether all have."""

    async def have_ended() -> bool:
        return not any(map(is_alive, processes))

    with contextlib.suppress(TimeoutError):
        await wait_until(have_ended)
    return not any(map(is_alive, processes))


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs. A process that has ended, but that no parent has waited for (a zombie), does not
    run.
    """
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def score_on_two_nodes(folder: Path, node: RayNode) -> dict[str, Any]:
    """Run all phases, and return the results that the test compares."""
    scoring, found = Scoring(folder), dict[str, Any]()
    now = folder / "now"
    now.touch()
    scoring.start()
    await scoring.await_actors(2)
    first = await scoring.take(scoring.ask(40, now))
    on_node = set(node.processes)
    found["actors"], found["on node"] = len(first), len(on_node & set(first))
    [helper] = on_node & set(first)
    [home] = set(first) - {helper}

    lost = find_workers(helper)
    waiting = scoring.ask(12, later := folder / "later")
    await asyncio.sleep(2.0)  # now both actors have responses
    [raylet] = [pid for pid in node.processes if psutil.Process(pid).name() == "raylet"]
    os.kill(raylet, signal.SIGKILL)
    found["processes of the lost node ended"] = await await_end(lost)
    later.touch()
    found["scored by the lost node"] = (await scoring.take(waiting))[helper]
    await scoring.await_actors(2)
    again = await scoring.take(scoring.ask(40, now))
    found["actors after the loss"] = len(again)
    [second] = set(again) - {home}
    actor: Any = scoring.actor
    found["scored"], found["asked"] = (await actor.status.remote()).scored, scoring.numbers

    lost = [*find_workers(home), *find_workers(second)]
    waiting = scoring.ask(6, last := folder / "last")
    await asyncio.sleep(2.0)
    os.kill(home, signal.SIGKILL)
    found["helper ended with its owner"] = await await_end(lost)
    last.touch()
    scoring.start()
    found["scored by the dead owner"] = (await scoring.take(waiting))[home]
    await scoring.await_actors(2)
    third = await scoring.take(scoring.ask(40, now))
    found["actors after a restart"], found["new actors"] = len(third), len(set(third) - {home, second})

    lost = [process for pid in third for process in find_workers(pid)[1:]]
    [helper] = [pid for pid in third if pid != await pid_of(scoring.actor)]
    lost.append(psutil.Process(helper))
    actor = scoring.actor
    await actor.finish.remote()
    running: Any = scoring.running
    found["returned"], found["asked of the successor"] = await running, 6 + 40
    found["all ended"] = await await_end(lost)
    return found


async def run_programs(folder: Path, node: RayNode) -> dict[str, Any]:
    """Let the queue of programs start a helper, and kill the helper while its sandboxes run."""
    scoring, tokenizer = Scoring(folder), Tokenizer.from_file(str(folder / "run/policy/tokenizer.json"))
    scoring.start()
    quick, slow = (ScoreRequest(tokenizer.encode(text).ids, CASES) for text in (QUICK, SLOW))
    first = await scoring.client.score(quick)
    if first.outcome is Outcome.UNPARSABLE:
        return {"skip": first.reason}
    found = {"actors at first": (await scoring.await_status(lambda status: status.scored == 1)).actors}
    waiting = [asyncio.ensure_future(scoring.client.score(slow)) for _ in range(PROGRAMS)]
    await scoring.await_actors(2)
    async with asyncio.timeout(WAIT_SECONDS):
        while not (helper := await find_helper()) or len(find_workers(helper)) < SANDBOXED:
            await asyncio.sleep(0.1)
    lost = find_workers(helper)
    os.kill(helper, signal.SIGKILL)
    found["all of the helper ended"] = await await_end(lost)
    async with asyncio.timeout(2 * WAIT_SECONDS):
        found["correct"] = sum(score.outcome is Outcome.CORRECT for score in await asyncio.gather(*waiting))
    found["scored"] = (await scoring.await_status(lambda status: status.actors == 1)).scored
    found["helpers left"] = await find_helper()
    return found


async def find_helper() -> int:
    """Return the process of a living helper, or 0."""
    import ray

    states = (await asyncio.to_thread(ray._private.state.actors)).values()
    alive = [one for one in states if one["ActorClassName"] == "RewardHelper" and one["State"] == "ALIVE"]
    return int(alive[0]["Pid"]) if alive else 0


async def pid_of(actor: Any) -> int:
    """Return the process of an actor."""
    import ray

    state = await asyncio.to_thread(ray._private.state.actors, actor._actor_id.hex())
    return int(state["Pid"])


def prepare(folder: Path, reward: RewardConfig, actors: RewardActorsConfig) -> None:
    """Write a run with these rewards."""
    from rollflow.storage.objects import open_store
    from rollflow.tasks.policies.config import ColdStart
    from rollflow.tasks.policies.folder import build_cold_folder
    from rollflow.tasks.prompts.config import ReasoningGymPrompts
    from rollflow.tasks.run.cluster_config import ClusterConfig
    from rollflow.tasks.run.config import RunConfig
    from tests.support.described import describe

    store = open_store(str(folder / "run"))
    cluster = ClusterConfig(reward_actors=actors, lease_seconds=0)
    describe(store, "places", RunConfig(prompts=(ReasoningGymPrompts(),), reward=reward, cluster=cluster))
    for name, data in build_cold_folder(ColdStart(), [QUICK, SLOW]).items():
        store.put(f"policy/{name}", data)


def main() -> None:
    mode, folder = sys.argv[1], Path(sys.argv[2])
    head = RayHead(folder / "ray", cpus=2)
    os.environ.update(head.env)
    with head, RayNode(head, cpus=2) as node:
        from rollflow.flows.ray_cluster import cluster

        prepare(folder, *CONFIGS[mode])
        cluster.attach(head.address, "places", deadline_seconds=60)
        found = asyncio.run((score_on_two_nodes if mode == "nodes" else run_programs)(folder, node))
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
