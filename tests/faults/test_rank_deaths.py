"""Tests a learner whose ranks are separate processes: an error names a rank that dies, hangs or fails, and no rank
outlives its owner.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import pyarrow as pa
import pytest
import torch

from rollflow.storage.audit.audit import audit
from rollflow.storage.errors import ConfigError, RankFailed
from rollflow.tasks.actors.learner import LearnerActor
from rollflow.tasks.learners.base import LearnerStart
from rollflow.tasks.learners.config import TorchTrain
from rollflow.tasks.learners.distributed.gloo_ranks import serve_store
from rollflow.tasks.learners.distributed.rank_protocol import LoadState, Meeting, Pipes, RankHosts, StartedRank
from rollflow.tasks.learners.multi_rank import rank_process
from rollflow.tasks.learners.multi_rank.multi_rank_learner import MultiRankLearner
from rollflow.tasks.learners.multi_rank.rank_process import run_rank
from rollflow.tasks.runtime.actor_warnings import Warnings
from rollflow.testing.learners import batch
from tests.support.small_run import StoreFeed, prepare_small, train_small
from tests.support.tiny_policy import make_policy, make_weights
from tests.support.waiting import until

pytestmark = pytest.mark.long

ENDS_SECONDS = 60.0  # the longest wait for the end of a process, which normally takes a moment
OWNER = """
import sys
from pathlib import Path
from tests.faults.test_rank_deaths import pids, ranked
if __name__ == "__main__":
    made = ranked(Path(sys.argv[1]), 3, 60.0)
    print(*pids(made), flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(make_policy(tmp_path_factory.mktemp("policy")), seed=1)


def ranked(folder: Path, ranks: int, seconds: float) -> MultiRankLearner:
    return MultiRankLearner(
        TorchTrain(ranks=ranks, rank_seconds=seconds), LearnerStart(folder, trained=True, versions=10)
    )


def pids(made: MultiRankLearner) -> list[int]:
    """Return the process ids of all ranks except the first."""
    found = [one.process.pid for one in made._others._started.values()]
    return [pid for pid in found if pid is not None]


def ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_for_ends(of: list[int]) -> None:
    deadline = time.monotonic() + ENDS_SECONDS
    while not all(map(ended, of)):
        assert time.monotonic() < deadline, of
        time.sleep(0.05)


def _warns(*given: Any) -> None:
    """Start a rank that logs a warning."""
    rank_process.take_gpu = lambda rank: logging.getLogger("cards").warning("card %d is hot", rank)
    run_rank(*given)


def test_warning_on_any_learner_rank_is_logged_by_rank_0(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollflow.tasks.learners.multi_rank.multi_rank_learner.run_rank", _warns)
    heard, made = Warnings("learner"), ranked(folder, 3, 60.0)
    try:
        warned = [one for one in heard.read() if "is hot" in one.text]
    finally:
        made._others.end()
        logging.getLogger().removeHandler(heard)
        logging.captureWarnings(False)
    (one,) = warned  # one warning for all ranks, because their warnings differ only in the rank's number
    assert (one.actor, one.text) == ("learner", f"rank {one.rank} of 3: card {one.rank} is hot")


def steps(made: MultiRankLearner, versions: range) -> None:
    for version in versions:
        made.step(batch(version), version)


TROUBLE: dict[str, tuple[Callable[[MultiRankLearner], None], float, str]] = {
    "killed": (lambda made: os.kill(pids(made)[1], signal.SIGKILL), 60.0, "rank 2 of 3 was killed by SIGKILL"),
    "stopped": (
        lambda made: os.kill(pids(made)[0], signal.SIGSTOP),
        3.0,
        "rank 1 of 3 did not reach the other ranks within 3 s",
    ),
    "failing": (
        lambda made: made._others._started[2].pipes.orders.send(LoadState({}, {}, None)),
        60.0,
        "rank 2 of 3 failed (Corrupt: the tensors of the weights differ in name or shape ",
    ),
}


@pytest.mark.parametrize(
    "trouble", [pytest.param(name, marks=pytest.mark.soak) if name == "stopped" else name for name in TROUBLE]
)
def test_error_names_a_failed_learner_rank_and_all_ranks_end(folder: Path, trouble: str) -> None:
    cause, seconds, why = TROUBLE[trouble]
    made = ranked(folder, 3, seconds)
    made.step(batch(0), 0)
    cause(made)
    with pytest.raises(RankFailed) as caught:
        steps(made, range(1, 9))
    assert str(caught.value).startswith(why)
    assert len(str(caught.value).splitlines()) == 1
    wait_for_ends(pids(made))
    with pytest.raises(RankFailed):  # the next call raises the same error
        made.step(batch(9), 9)


def _exit(*_: object) -> None:
    os._exit(7)


class Killing(StoreFeed):
    """A feed that kills a rank of its learner when batch 1 is requested."""

    actor: LearnerActor

    def lease(self, number: int, deadline: float, *, afresh: bool = False) -> pa.Buffer:
        """See `StoreFeed`."""
        data = super().lease(number, deadline, afresh=afresh)
        if number == 1:
            assert isinstance(self.actor.learner, MultiRankLearner)
            os.kill(pids(self.actor.learner)[0], signal.SIGKILL)
        return data


@pytest.mark.parametrize("learner", ["torch", pytest.param("deepspeed", marks=pytest.mark.soak)])
def test_run_with_a_killed_learner_rank_is_bit_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learner: str
) -> None:
    """The learner's actor raises an error, after which the train stage would start a new actor."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    train = {"kind": learner, "ranks": 2}
    whole, broken = (prepare_small(tmp_path, name, versions=2, train=train) for name in ("whole", "broken"))
    costs = {cost.role: cost.seconds for cost in train_small(whole).status().costs}
    assert costs["learner ranks"] > 0  # only the owner can measure the CPU time of ranks
    feed = Killing(broken)
    feed.actor = LearnerActor(broken, channel=feed)
    with pytest.raises(RankFailed, match=r"^rank 1 of 2 was killed by SIGKILL while version 2 was trained"):
        feed.actor.run()
    assert train_small(broken).version == 2
    shas = [{o.path.rpartition("/")[2]: o.sha256 for o in run.policies.find(2).objects} for run in (whole, broken)]
    assert shas[0] == shas[1]
    assert audit(broken.store).clean


class Waiting(Killing):
    """A feed without batch 1, which kills a rank when this batch is requested."""

    def lease(self, number: int, deadline: float, *, afresh: bool = False) -> pa.Buffer:
        """See `StoreFeed`."""
        found = super().lease(number, deadline, afresh=afresh)
        if number == 1:
            learner = self.actor.learner
            assert isinstance(learner, MultiRankLearner)
            until(lambda: not any(one.read_exit() is None for one in learner._others._started.values()))
            raise TimeoutError("there is no batch 1 yet")
        return found


def test_error_names_a_learner_rank_that_dies_during_a_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version whose publication was pending is still published."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    run = prepare_small(tmp_path, versions=2, train={"ranks": 2})
    feed = Waiting(run)
    feed.actor = LearnerActor(run, channel=feed)
    with pytest.raises(RankFailed, match=r"^rank 1 of 2 was killed by SIGKILL while the next batch was waited for"):
        feed.actor.run()
    assert run.policies.newest() == 1


def test_error_names_a_learner_rank_that_dies_at_its_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollflow.tasks.learners.multi_rank.multi_rank_learner.run_rank", _exit)
    with pytest.raises(RankFailed, match=r"^rank 1 of 2 ended with code 7 while the ranks started"):
        ranked(folder, 2, 60.0)


def test_learner_ranks_wait_while_rank_0_loads_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit of collective operations must not include the loading of weights, which takes minutes for a large
    policy.
    """
    met, store = Event(), serve_store()

    class Met(EOFError):
        """An `EOFError`, as a pipe without an owner raises it, but from another cause, such as a truncated file."""

    def meet(*given: Any, **named: Any) -> None:
        met.set()
        raise Met

    monkeypatch.setattr(rank_process, "GlooRanks", meet)
    monkeypatch.setattr(rank_process.os, "_exit", lambda code: None)
    pipes = Pipes(*(multiprocessing.Pipe()[0] for _ in range(2)))
    start = LearnerStart(folder, trained=True, versions=10)
    given = 1, Meeting("127.0.0.1", store.port), "127.0.0.1", pipes, TorchTrain(ranks=2), start
    rank = Thread(target=rank_process.serve_rank, args=given, daemon=True)
    rank.start()
    until(lambda: store.check([rank_process.ready_key(1)]))
    assert not met.wait(1.0)
    store.set(rank_process.MEET, "")
    assert met.wait(ENDS_SECONDS)
    until(lambda: store.check([rank_process.failed_key(1)]))
    assert store.get(rank_process.failed_key(1)).startswith(b"Met")
    # wait until the rank has called the fake `_exit`, because the real `_exit` would end this process
    rank.join(ENDS_SECONDS)
    assert not rank.is_alive()


def test_more_learner_ranks_than_gpus_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        ConfigError,
        match=r"^train.ranks = 2: each rank needs its own GPU, but this machine has only 1 GPUs; set train.ranks = 1$",
    ):
        ranked(folder, 2, 60.0)


def test_multi_node_ranks_are_not_limited_by_local_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs of the first rank's machine do not limit the number of ranks. No rank starts in this test, because
    `_never` raises an error.
    """
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    far = RankHosts(start=_never)
    with pytest.raises(NotImplementedError):
        MultiRankLearner(TorchTrain(ranks=2), LearnerStart(folder, trained=True, versions=10, ranks=far))


def _never(rank: int, meeting: Meeting) -> StartedRank:
    raise NotImplementedError


def test_learner_ranks_end_when_the_learner_is_deleted(folder: Path) -> None:
    made = ranked(folder, 2, 60.0)
    found = pids(made)
    assert [psutil.Process(pid).name() for pid in found] == ["rank 1 of 2"]  # the process's title names the rank
    del made
    wait_for_ends(found)


@pytest.mark.parametrize("stopped", [pytest.param(False, marks=pytest.mark.soak), True])
def test_learner_rank_ends_with_its_parent_process(folder: Path, stopped: bool) -> None:
    """A rank that is stopped by SIGSTOP does not outlive its owner, either."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdin=pipe, stdout=pipe, text=True) as owner:
        assert owner.stdout is not None
        found = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(found) == 2
        if stopped:
            os.kill(found[0], signal.SIGSTOP)
        owner.kill()
        wait_for_ends(found)
