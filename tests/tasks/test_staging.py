"""Tests that the ranks of a sharded learner store its files together: the files are the same as those of one rank, in
any store.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer
from typing import Any

import psutil
import pytest
import torch

from rollflow.storage.errors import ConfigError, RankFailed, StoreFailed, Unreachable
from rollflow.storage.log.entries import RunCreated
from rollflow.storage.log.run_log import Log, Writer
from rollflow.storage.objects.base import Data, hash_pieces, split_buffers
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.policies import PolicyStore
from rollflow.storage.records import StoredObject
from rollflow.tasks.learners import build_learner
from rollflow.tasks.learners.base import LearnerStart
from rollflow.tasks.learners.checkpoint.sharded_files import GatheredFiles, stage_files
from rollflow.tasks.learners.config import DeepSpeedTrain, TorchTrain, TrainConfig
from rollflow.tasks.learners.malloc_trim import given_back
from rollflow.tasks.learners.multi_rank.multi_rank_learner import MultiRankLearner
from rollflow.testing.learners import batch
from tests.support.tiny_policy import make_policy, make_weights
from tests.tasks.test_sharded import KINDS, SOAK

SHARD_BYTES = 2**14  # a small limit gives many files, and some tensors are larger than the limit
SECONDS, SLOW_SECONDS, KILL_SECONDS = 4.0, 6.0, 1.5
KIND = {**KINDS["PPO with a critic"], "learning_rate": 1e-4}
ROLES = {**KINDS["a penalty to a reference"], "learning_rate": 1e-4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(make_policy(tmp_path_factory.mktemp("policy")), seed=1)


def begun(folder: Path, config: TrainConfig) -> Any:
    return build_learner(config, LearnerStart(folder, trained=True, versions=12, shard_bytes=SHARD_BYTES))


def in_parts(folder: Path, ranks: int = 2, seconds: float = 60.0, **given: Any) -> MultiRankLearner:
    made: MultiRankLearner = begun(folder, TorchTrain(sharded=True, ranks=ranks, rank_seconds=seconds, **given))
    return made


@dataclass(frozen=True)
class Odd(LocalStore):
    """A store in a folder that behaves differently in processes other than `owner`, even after it was pickled."""

    owner: int = field(default_factory=os.getpid)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.root, None, self.owner)

    @property
    def other(self) -> bool:
        """True in processes other than `owner`."""
        return os.getpid() != self.owner


class Signed(Odd):
    """A store that records which process stored each object."""

    def put(self, path: str, data: Data) -> str:
        super().put(f"by/{path}", str(os.getpid()).encode())
        return super().put(path, data)


class Full(Odd):
    """A store that is full for other processes."""

    error: type[Exception] = StoreFailed

    def put(self, path: str, data: Data) -> str:
        if self.other:
            raise self.error("the disk of that machine is full")
        return super().put(path, data)


class Away(Full):
    """A store that is unreachable for other processes."""

    error = Unreachable


class Elsewhere(Odd):
    """A store in which processes other than `owner` write into another folder."""

    def put(self, path: str, data: Data) -> str:
        return super().put(f"elsewhere/{path}" if self.other else path, data)


class Slow(Odd):
    """A store that is slower in other processes than the time limit of the ranks."""

    def put(self, path: str, data: Data) -> str:
        if self.other:
            time.sleep(SLOW_SECONDS)
        return super().put(path, data)


class Stopped(Odd):
    """A store that stops processes other than `owner` in the middle of a write."""

    def put(self, path: str, data: Data) -> str:
        if self.other:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().put(path, data)


@pytest.fixture
def ended() -> Iterator[list[MultiRankLearner]]:
    """Collect learners, and end them after the test."""
    found: list[MultiRankLearner] = []
    yield found
    for made in found:
        made._others.end()


def policies_in(store: LocalStore) -> tuple[PolicyStore, Writer]:
    log = Log(store)
    log.create(RunCreated("staging", {"async_ratio": 1, "group_size": 4, "store": {}}, "", 1))
    log.claim("supervisor")
    return PolicyStore(log), log.claim("learner")


def stored(made: Any, policies: PolicyStore, writer: Writer, version: int = 0) -> list[StoredObject]:
    return [one for files in (made.weights(), made.state()) for one in stage_files(policies, writer, version, files)]


def expected(made: Any) -> Mapping[str, str]:
    """Return the hash of every file, gathered in this process."""
    return {
        name: hash_pieces(split_buffers(data))
        for files in (made.weights(), made.state())
        for name, data in files.items()
    }


@pytest.mark.long
@pytest.mark.parametrize(("kind", "ranks"), [(KIND, 3), (ROLES, 2), pytest.param(ROLES, 4, marks=SOAK)])
def test_ranks_store_the_files_that_one_rank_would_store(
    folder: Path, tmp_path: Path, ended: list[MultiRankLearner], kind: Mapping[str, Any], ranks: int
) -> None:
    """Each rank stores about the same number of files, and the first rank stores its own state. A learner with one rank
    continues from the files.
    """
    ended.append(made := in_parts(folder, ranks, **kind))
    made.step(batch(0), 0)
    policies, writer = policies_in(Signed(tmp_path))
    found = stored(made, policies, writer)
    names = {one.path.split("/", 3)[3]: one for one in found}
    assert {name: one.sha256 for name, one in names.items()} == expected(made)
    assert {one.path: one.size for one in found} == {one.path: (tmp_path / one.path).stat().st_size for one in found}
    by = {name: int((tmp_path / "by" / one.path).read_bytes()) for name, one in names.items()}
    counts = sorted([*by.values()].count(pid) for pid in {*by.values()})
    assert (len(counts), counts[0] >= len(found) / ranks - 3) == (
        ranks,
        True,
    )  # two files belong to the first rank alone
    last = max(name for name in names if name.startswith("learner/state-"))
    assert by[last] == os.getpid()
    alone = begun(folder, TorchTrain(**kind))
    alone.load(*({n: (tmp_path / one.path).read_bytes() for n, one in names.items() if n[0] == of} for of in "wl"))
    assert expected(alone) == expected(made)


@pytest.mark.soak
def test_deepspeed_ranks_store_their_own_files(folder: Path, tmp_path: Path, ended: list[MultiRankLearner]) -> None:
    """DeepSpeed's ranks also share the work of storing files."""
    ended.append(made := begun(folder, DeepSpeedTrain.model_validate({"zero": 2, "ranks": 2, **KIND})))
    made.step(batch(0), 0)
    found = stored(made, *policies_in(Signed(tmp_path)))
    assert {one.path.split("/", 3)[3]: one.sha256 for one in found} == expected(made)
    assert len({(tmp_path / "by" / one.path).read_bytes() for one in found}) == 2


@pytest.mark.long
@pytest.mark.parametrize("kind", [Full, pytest.param(Away, marks=SOAK)])
def test_storage_error_on_a_rank_is_raised_by_the_learner(
    folder: Path, tmp_path: Path, ended: list[MultiRankLearner], kind: type[Full]
) -> None:
    ended.append(made := in_parts(folder))
    made.step(batch(0), 0)
    policies, writer = policies_in(kind(tmp_path))
    with pytest.raises(kind.error, match="the disk of that machine is full"):
        stored(made, policies, writer)
    made.step(batch(1), 1)
    found = stored(made, PolicyStore(Log(LocalStore(tmp_path))), writer, 1)
    assert {one.path.split("/", 3)[3]: one.sha256 for one in found} == expected(made)


@pytest.mark.long
def test_store_folder_that_a_rank_does_not_share_is_refused(
    folder: Path, tmp_path: Path, ended: list[MultiRankLearner]
) -> None:
    """With a store that a rank does not share, a log entry would name a file that other processes cannot find."""
    ended.append(made := in_parts(folder))
    made.step(batch(0), 0)
    with pytest.raises(ConfigError, match=r"rank 1 has stored policies/.* set store\.uri to a store that all machines"):
        stored(made, *policies_in(Elsewhere(tmp_path)))


@pytest.mark.long
def test_slow_storage_does_not_count_as_a_hanging_rank(
    folder: Path, tmp_path: Path, ended: list[MultiRankLearner]
) -> None:
    """The store takes longer than the time limit within which the ranks must answer each other."""
    ended.append(made := in_parts(folder, seconds=SECONDS))
    made.step(batch(0), 0)
    files, sizes = made.weights(), made._own.sizes()
    assert isinstance(files, GatheredFiles)
    second = list(sizes)[1]  # the second of two ranks stores it
    found = files.put(second, Slow(tmp_path), "stored")
    assert found.sha256 == hash_pieces(split_buffers(files[second]))


@pytest.mark.long
@pytest.mark.parametrize("sent", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=SOAK)])
def test_error_names_a_rank_that_dies_while_storing(
    folder: Path, tmp_path: Path, ended: list[MultiRankLearner], sent: signal.Signals
) -> None:
    """The third of three ranks is killed or stopped while it stores a file."""
    ended.append(made := in_parts(folder, 3, seconds=SECONDS))
    made.step(batch(0), 0)
    files, third = made.weights(), list(made._own.sizes())[2]
    assert isinstance(files, GatheredFiles)
    killed = Timer(KILL_SECONDS, lambda: os.kill(made._others._started[2].process.pid, signal.SIGKILL))
    store, sentence = Stopped(tmp_path), r"rank 2 of 3 did not reach the other ranks within"
    if sent == signal.SIGKILL:
        killed.start()
        store, sentence = Slow(tmp_path), "rank 2 of 3 was killed by SIGKILL"
    with pytest.raises(RankFailed, match=sentence):
        files.put(third, store, "stored")
    assert not (tmp_path / "stored").exists()
    deadline = time.monotonic() + 60
    while any(one.read_exit() is None for one in made._others._started.values()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_memory_of_a_gathered_weight_file_is_released() -> None:
    """Otherwise the C library would keep the memory of one file while the next file is gathered."""

    def resident() -> int:
        return psutil.Process().memory_info().rss

    before = resident()
    made = [given_back(torch.Size([2**18]), torch.float32) for _ in range(64)]  # a size that malloc keeps
    for tensor in made:
        tensor.fill_(1.0)
    assert resident() - before > 2**25
    del made, tensor
    assert resident() - before < 2**24
    assert given_back(torch.Size([0, 3]), torch.bfloat16).shape == (0, 3)
