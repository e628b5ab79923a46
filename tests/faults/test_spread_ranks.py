"""Tests learner ranks that are Ray actors: they train the same weights as forked ranks, and an error names a failed
rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
import ray

from rollflow.storage.audit.audit import audit
from rollflow.storage.errors import RankFailed
from rollflow.tasks.actors.learner import LearnerActor
from rollflow.tasks.actors.ranks import SpreadRank, place_in_turn, rank_hosts
from rollflow.tasks.learners.distributed.gloo_ranks import serve_store
from rollflow.tasks.learners.distributed.rank_protocol import LoadState, Meeting
from rollflow.tasks.learners.multi_rank.multi_rank_learner import MultiRankLearner
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.restore import new_learner
from tests.support.small_run import StoreFeed, prepare_small, train_small
from tests.support.waiting import until

HANG_SECONDS = 180.0
SOAK = pytest.mark.soak
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_node: None) -> Path:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    return tmp_path


def processes() -> list[psutil.Process]:
    """Return the processes of all ranks that are actors."""
    found = []
    for process in psutil.Process().children(recursive=True):  # Ray's node is a child of this process
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().startswith("ray::Rank") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def weights(run: RunContext, version: int) -> list[str]:
    return [stored.sha256 for stored in run.policies.find(version).objects]


@pytest.mark.parametrize(
    "train",
    [
        pytest.param({"ranks": 2}, id="whole", marks=SOAK),
        pytest.param({"ranks": 3, "sharded": True}, id="sharded", marks=SOAK),
        pytest.param({"ranks": 2, "kind": "deepspeed"}, id="DeepSpeed", marks=SOAK),
    ],
)
def test_multi_node_ranks_train_like_ranks_on_one_node(place: Path, train: dict[str, Any]) -> None:
    near = prepare_small(place, "near", versions=2, train=train)
    far = prepare_small(place, "far", versions=2, train={**train, "multi_node": True})
    train_small(near)
    train_small(far)
    assert weights(far, 2) == weights(near, 2)
    assert audit(far.store).clean
    until(lambda: not processes())  # the ranks end with their learner


class Troubled(StoreFeed):
    """A feed of batches that disturbs the ranks before it gives batch 1."""

    actor: LearnerActor

    def __init__(self, run: RunContext, do: Callable[[MultiRankLearner], None]) -> None:
        super().__init__(run)
        self._do = do

    def lease(self, number: int, deadline: float, *, afresh: bool = False) -> pa.Buffer:
        """See `StoreFeed`."""
        if number == 1:
            learner = self.actor.learner
            assert isinstance(learner, MultiRankLearner)
            self._do(learner)
        return super().lease(number, deadline, afresh=afresh)


def send(sent: signal.Signals) -> Callable[[MultiRankLearner], None]:
    """Return a function that sends the signal to the process of a learner's other rank."""

    def do(learner: MultiRankLearner) -> None:
        (rank,) = processes()
        os.kill(rank.pid, sent)
        if sent == signal.SIGKILL:
            until(lambda: learner._others._started[1].read_exit() is not None)

    return do


def nonsense(learner: MultiRankLearner) -> None:
    """Send an order to the rank that fails there."""
    learner._others._started[1].pipes.orders.send(LoadState({}, {}, None))


TROUBLE: list[Any] = [
    pytest.param(send(signal.SIGKILL), 600.0, "ended, because its process or its machine is gone", id="killed"),
    pytest.param(send(signal.SIGSTOP), 5.0, "did not reach the other ranks within 5 s", id="stopped", marks=SOAK),
    pytest.param(
        nonsense,
        600.0,
        r"failed \(Corrupt: the tensors of the weights differ in name or shape .*\)",
        id="failing",
        marks=SOAK,
    ),
]


@pytest.mark.parametrize(("do", "seconds", "sentence"), TROUBLE)
def test_error_names_a_dead_multi_node_rank_and_run_continues(
    place: Path, do: Callable[[MultiRankLearner], None], seconds: float, sentence: str
) -> None:
    train = {"ranks": 2, "rank_seconds": seconds}
    quiet = prepare_small(place, "quiet", versions=2, train=train)
    run = prepare_small(place, "troubled", versions=2, train={**train, "multi_node": True})
    train_small(quiet)
    feed = Troubled(run, do)
    feed.actor = LearnerActor(run, channel=feed)
    with pytest.raises(RankFailed, match=rf"^rank 1 of 2 {sentence} while (version 2 was trained|the next batch)"):
        feed.actor.run()
    until(lambda: not processes())
    assert train_small(run).version == 2
    assert weights(run, 2) == weights(quiet, 2)
    assert audit(run.store).clean


class Owner:
    """An actor that owns a learner."""

    def begin(self, run: RunContext) -> int:
        """Start the learner, and return this process's id."""
        self._learner = new_learner(run, ranks=rank_hosts(run))
        return os.getpid()


@pytest.mark.soak
def test_multi_node_rank_ends_with_its_parent_process(place: Path) -> None:
    run = prepare_small(place, versions=2, train={"ranks": 2, "multi_node": True})
    owner = ray.remote(Owner).remote()
    pid = ray.get(owner.begin.remote(run), timeout=HANG_SECONDS)
    assert len(processes()) == 1
    os.kill(pid, signal.SIGKILL)
    until(lambda: not processes())


def test_rank_refuses_a_caller_without_the_secret(place: Path) -> None:
    """A caller that connects to the port of a rank must know the secret."""
    run = prepare_small(place, versions=2, train={"ranks": 2, "multi_node": True})
    started = SpreadRank(run, partial(place_in_turn, run.config), 1, Meeting("127.0.0.1", serve_store().port))
    try:
        with pytest.raises(AuthenticationError):
            Client(started._listener.address, authkey=b"guessed")
        assert started.pipes  # the rank itself was accepted
    finally:
        started.end()


WITH_GPUS = """
import ray
from rollflow.storage.errors import Unreachable
from rollflow.tasks.actors import ranks
from rollflow.tasks.run.config import RunConfig

ray.init("local", num_cpus=2, num_gpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")


class Owner:
    def begin(self, seconds, run, others=2):
        try:
            self.room = ranks.reserve_gpus(RunConfig(), others, seconds, run)
        except Unreachable as error:
            return str(error)
        self.ranks = [ray.remote(Rank).options(**self.room(rank)).remote() for rank in range(1, others + 1)]
        return sorted(ray.get([rank.gpus.remote() for rank in self.ranks]))


class Rank:
    def gpus(self):
        return len(ray.get_gpu_ids())


def owner():
    return ray.remote(Owner).options(num_gpus=1, num_cpus=0).remote()


first = owner()
assert ray.get(first.begin.remote(60.0, "one")) == [1, 1]  # three of four are taken
second = owner()  # has the fourth
said = ray.get(second.begin.remote(1.0, "two"))
assert said.startswith("train.ranks = 3: 2 GPUs were not free at the same time within 1 s; wait for another run"), said
ray.kill(second)
ray.kill(first)
again = owner()  # of the first run
assert ray.get(again.begin.remote(60.0, "one"), timeout=90.0) == [1, 1]
print("right")
"""


def test_gpus_of_multi_node_ranks_are_reserved_together() -> None:
    """The ranks of a second learner get all their GPUs or an error. The GPUs are only numbers for Ray, so no GPU is
    needed.
    """
    done = subprocess.run([sys.executable, "-c", WITH_GPUS], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.stdout.strip().endswith("right"), done.stderr[-2000:]
