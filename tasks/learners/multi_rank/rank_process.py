"""The process of a rank other than the first, which executes the commands of the first rank.

    orders --> load files or train on a batch, both sent by the first rank             --> next order
    requests for files --> send shards of a file or store the file, even during a step --> next request

- A rank's process ends when the process of the first rank ends, even if SIGSTOP has suspended the rank's process. The
  kernel kills a rank's process when the fork server ends, and the fork server ends together with the first rank.
- A command has no answer, because the first rank computes the result of each train step itself. If a rank fails, it
  writes the reason to the TCP store and ends. If a rank loses contact with the other ranks, it ends with the exit code
  `LOST`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from threading import Condition, Thread
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import ConfigError, NotFinite
from rollflow.storage.objects.base import Data, split_buffers
from rollflow.tasks.learners.base import LearnerStart
from rollflow.tasks.learners.config import DeepSpeedTrain, TorchTrain, TrainBase
from rollflow.tasks.learners.distributed.gloo_ranks import GlooRanks, connect_store
from rollflow.tasks.learners.distributed.publish_barrier import StepStopped, follow_first_rank
from rollflow.tasks.learners.distributed.rank_gpus import take_gpu
from rollflow.tasks.learners.distributed.rank_protocol import (
    ComputeLogprobs,
    FindNonfinite,
    LoadState,
    Meeting,
    Order,
    Pipes,
    SendFile,
    ShardModel,
    TrainStep,
    TryModel,
)
from rollflow.tasks.learners.distributed.ranks import RankLost, raise_lost
from rollflow.tasks.learners.distributed.staging import stage
from rollflow.tasks.learners.sharding.sharded_learner import ShardedLearner
from rollflow.tasks.learners.torch_learner import TorchLearner
from rollflow.tasks.runtime.actor_warnings import send_to
from rollflow.tasks.runtime.fork_server import PR_SET_NAME

MEET = "meet"  # key of the TCP store that the first rank sets when all ranks have started
POLL_SECONDS = 0.1
LOST, FAILED = 3, 4  # exit codes of a rank: LOST if it lost contact with other ranks, FAILED if it failed itself
PR_SET_PDEATHSIG = 1
CHUNK = 2**25  # largest number of bytes in one broadcast


class OwnerGone(Exception):
    """Raised on a rank when the first rank has closed its end of the pipe, so that no command will follow."""


class OrderCount:
    """The number of commands that a rank has executed."""

    def __init__(self) -> None:
        self._count, self._changed = 0, Condition()

    def count_order(self) -> None:
        """Count one more executed command."""
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait_for(self, count: int, seconds: float) -> None:
        """Wait until the rank has executed `count` commands; raise `RankLost` if this takes longer than `seconds`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._count >= count, seconds):
                raise RankLost(f"the rank did not finish {count} commands within {seconds:g} s")


def learner_of(config: TrainBase) -> type[TorchLearner]:
    """Return the learner class that each rank runs; raise `ConfigError` if DeepSpeed is needed but not installed."""
    if isinstance(config, DeepSpeedTrain):
        if find_spec("deepspeed") is None:
            cure = 'install it with `pip install "rollflow[deepspeed]"`, or set train.kind = "torch"'
            raise ConfigError(f"train.kind = deepspeed: DeepSpeed is not installed on this machine; {cure}")
        from rollflow.tasks.learners.sharding.deepspeed_learner import DeepSpeedLearner

        return DeepSpeedLearner
    if isinstance(config, TorchTrain) and config.sharded:
        from rollflow.tasks.learners.sharding.fsdp_learner import FsdpLearner

        return FsdpLearner
    return TorchLearner


def run_rank(
    rank: int, meeting: Meeting, pipes: Pipes, config: TrainBase, start: LearnerStart, ear: socket.socket
) -> None:
    """Run a rank in a forked process; warnings are sent to the socket `ear`."""
    _end_with_owner()
    _name_process(name := f"rank {rank} of {config.ranks}")
    send_to(ear, name, rank)
    take_gpu(rank)
    serve_rank(rank, meeting, meeting.host, pipes, config, start)


def serve_rank(rank: int, meeting: Meeting, host: str, pipes: Pipes, config: TrainBase, start: LearnerStart) -> None:
    """Execute the commands of the first rank until the first rank's process ends. `host` is the address of this machine
    for the other ranks."""
    store, obeyed = connect_store(meeting.host, meeting.port), OrderCount()
    with _exit_on_error(store, rank):
        # The learner starts without weights, because the first rank sends weights and state.
        learner = learner_of(config).create(config, replace(start, blank=True))
        store.set(ready_key(rank), "")
        # This rank waits without a time limit, because the first rank raises an error if any rank starts too late.
        while not store.check([MEET]):
            time.sleep(POLL_SECONDS)
        learner.ranks = ranks = GlooRanks(store, rank, config.ranks, config.rank_seconds, host=host)
        Thread(target=_serve_files, args=(store, learner, pipes.asked, obeyed), daemon=True).start()
        while True:
            order: Order = _read_pipe(pipes.orders)
            with raise_lost():
                _execute(learner, ranks, order)
            obeyed.count_order()


def _read_pipe(pipe: Connection) -> Any:
    """Return the next command or request of the first rank; raise `OwnerGone` if the pipe is closed.

    Only a closed pipe raises `OwnerGone`, so that errors of the rank's own work are not mistaken for a closed pipe.
    """
    try:
        return pipe.recv()
    except (EOFError, ConnectionError) as error:
        raise OwnerGone from error


def _serve_files(store: Store, learner: TorchLearner, asked: Connection, obeyed: OrderCount) -> None:
    """Send this rank's shards of files on request until the first rank's process ends."""
    ranks = learner.ranks
    assert isinstance(ranks, GlooRanks)
    with _exit_on_error(store, ranks.rank):
        while True:
            ask: SendFile = _read_pipe(asked)
            obeyed.wait_for(ask.after, ranks.seconds)
            assert isinstance(learner, ShardedLearner)
            data = learner.gather(ask.file, ask.to)
            if ask.to == ranks.rank:
                Thread(target=_stage, args=(store, ranks, ask, data), daemon=True).start()
            del data  # free the memory of the file while this thread waits for the next request


def _stage(store: Store, ranks: GlooRanks, ask: SendFile, data: Data) -> None:
    """Store a file that was gathered on this rank in the object store."""
    assert ask.place is not None
    with _exit_on_error(store, ranks.rank):
        stage(ranks, ask.place, data)


@contextlib.contextmanager
def _exit_on_error(store: Store, rank: int) -> Iterator[None]:
    """Run a block; if it raises an error, end the process with the exit code for the error."""
    try:
        yield
    except OwnerGone:
        return
    except RankLost:
        with contextlib.suppress(RuntimeError):
            store.set(gone_key(rank), "")
        os._exit(LOST)  # the first rank looks for the cause among ranks with other exit codes
    except Exception as error:  # noqa: BLE001 - the first rank reports any error
        with contextlib.suppress(RuntimeError):  # without the TCP store, no rank can read the reason
            store.set(failed_key(rank), f"{type(error).__name__}: {error}".partition("\n")[0])
        os._exit(FAILED)


def _execute(learner: TorchLearner, ranks: GlooRanks, order: Order) -> None:
    match order:
        case ComputeLogprobs():
            learner.logprobs(order.tokens)
        case FindNonfinite():
            learner.first_nonfinite()
        case ShardModel():
            learner.shard()
        case TryModel():
            learner.try_model()
        case LoadState():
            weights, state = (
                ((name, receive_data(ranks, n)) for name, n in part.items()) for part in (order.weights, order.state)
            )
            learner.take(weights, state)  # load each file as soon as it arrives
            learner.sharing, learner.blank = order.sharing, False
        case TrainStep():
            with contextlib.suppress(NotFinite, StepStopped):  # the first rank raises and reports the same error
                batch = TrajectoryBatch.from_bytes(bytes(receive_data(ranks, order.size)))
                learner.step(batch, order.version, partial(follow_first_rank, ranks))


def broadcast_data(ranks: GlooRanks, data: Data) -> None:
    """Broadcast bytes from the first rank to the other ranks in chunks, so that memory holds a copy of only one
    chunk."""
    for chunk in _chunks(data):
        ranks.broadcast(torch.frombuffer(chunk, dtype=torch.uint8))


def receive_data(ranks: GlooRanks, size: int) -> memoryview:
    """Receive `size` bytes that the first rank broadcasts."""
    data = bytearray(size)
    for begin in range(0, size, CHUNK):
        ranks.broadcast(torch.frombuffer(data, dtype=torch.uint8, count=min(CHUNK, size - begin), offset=begin))
    return memoryview(data)


def _chunks(data: Data) -> Iterator[bytearray]:
    """Yield all bytes of `data`, `CHUNK` bytes at a time."""
    chunk = bytearray()
    for piece in split_buffers(data):
        for begin in range(0, len(piece), CHUNK):
            chunk += piece[begin : begin + CHUNK]
            if len(chunk) >= CHUNK:
                yield chunk[:CHUNK]
                chunk = chunk[CHUNK:]
    if chunk:
        yield chunk


def ready_key(rank: int) -> str:
    """Return the key of the TCP store that a rank sets to report that it has started."""
    return f"ready/{rank}"


def gone_key(rank: int) -> str:
    """Return the key of the TCP store that a rank sets when it ends because it lost contact with another rank."""
    return f"gone/{rank}"


def failed_key(rank: int) -> str:
    """Return the key of the TCP store under which a rank writes the reason for its failure."""
    return f"failed/{rank}"


def _end_with_owner() -> None:
    """Make this process end with the process of the first rank, and ignore SIGINT, which the first rank handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform.startswith("linux"):
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The fork server ends when no process has this pipe open, so this process closes its copy.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]


def _name_process(name: str) -> None:
    """Set the process name that the program `top` shows. The kernel keeps the first 15 bytes of the name."""
    if sys.platform.startswith("linux"):
        _prctl(PR_SET_NAME, name.encode())


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
