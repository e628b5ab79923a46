"""The process of a rank that is not the first: it does what the first one orders, and nothing else.

    orders --> load what the first rank sends | take a step on the batch that it sends --> next order
    files that are asked for --> its parts of them, beside the step; some it stores     --> next file

- It ends with its owner, however that one ends, also where it is stopped itself: the process that it was forked from
  ends with the owner, and the kernel kills it with that one.
- It answers nothing: what a step gives, the first rank knows, too. When it fails it says why, and ends; when the
  others are lost it ends with `LOST`.
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
from rollflow.storage.objects.base import Data, pieces
from rollflow.tasks.fork_server import PR_SET_NAME
from rollflow.tasks.learners.base import LearnerStart
from rollflow.tasks.learners.config import DeepSpeedTrain, Ranked, TorchTrain
from rollflow.tasks.learners.gloo_ranks import GlooRanks, store_at
from rollflow.tasks.learners.rank_gpus import take_gpu
from rollflow.tasks.learners.rank_orders import Ask, Call, Load, Meeting, Pipes, Step
from rollflow.tasks.learners.ranks import Lost, lost
from rollflow.tasks.learners.settling import Stopped, told
from rollflow.tasks.learners.sharded import ShardedLearner
from rollflow.tasks.learners.staging import stage
from rollflow.tasks.learners.torch_learner import TorchLearner
from rollflow.tasks.warned import send_to

MEET = "meet"  # where the first rank says that it is there, too
POLL_SECONDS = 0.1
LOST, FAILED = 3, 4  # how a rank's process ends: the others are gone; it said why
PR_SET_PDEATHSIG = 1
CHUNK = 2**25  # bytes that are sent at a time


class OwnerGone(Exception):
    """There will be no more orders."""


class Obeyed:
    """How many orders a rank has obeyed."""

    def __init__(self) -> None:
        self._count, self._changed = 0, Condition()

    def one_more(self) -> None:
        """Another one."""
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait_for(self, count: int, seconds: float) -> None:
        """Until they are so many; `Lost` if that takes longer."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._count >= count, seconds):
                raise Lost(f"{count} orders were not obeyed within {seconds:g} s")


def learner_of(config: Ranked) -> type[TorchLearner]:
    """What each rank runs; raises `ConfigError` where its library is not installed."""
    if isinstance(config, DeepSpeedTrain):
        if find_spec("deepspeed") is None:
            cure = 'install it with `pip install "rollflow[deepspeed]"`, or set train.learner = "torch"'
            raise ConfigError(f"train.learner = deepspeed: DeepSpeed is not installed here; {cure}")
        from rollflow.tasks.learners.deepspeed_learner import DeepSpeedLearner

        return DeepSpeedLearner
    if isinstance(config, TorchTrain) and config.sharded:
        from rollflow.tasks.learners.fsdp_learner import FsdpLearner

        return FsdpLearner
    return TorchLearner


def run_rank(
    rank: int, meeting: Meeting, pipes: Pipes, config: Ranked, start: LearnerStart, ear: socket.socket
) -> None:
    """`serve_rank` in a process that was forked for it; `ear` is where it warns."""
    _end_with_owner()
    _be_named(name := f"rank {rank} of {config.ranks}")
    send_to(ear, name, rank)
    take_gpu(rank)
    serve_rank(rank, meeting, meeting.host, pipes, config, start)


def serve_rank(rank: int, meeting: Meeting, host: str, pipes: Pipes, config: Ranked, start: LearnerStart) -> None:
    """Until the owner ends. `host` is this machine's address, that the others reach it by."""
    store, obeyed = store_at(meeting.host, meeting.port), Obeyed()
    with _ending(store, rank):
        learner = learner_of(config).begun(config, replace(start, blank=True))  # the first rank sends all
        store.set(ready(rank), "")
        while not store.check([MEET]):  # the first rank reads its weights; who owns this process knows how long it may
            time.sleep(POLL_SECONDS)
        learner.ranks = ranks = GlooRanks(store, rank, config.ranks, config.rank_seconds, host=host)
        Thread(target=_give, args=(store, learner, pipes.asked, obeyed), daemon=True).start()
        while True:
            order: Call | Load | Step = _next(pipes.orders)
            with lost():
                _obey(learner, ranks, order)
            obeyed.one_more()


def _next(pipe: Connection) -> Any:
    """The next order, or question. (Work may raise what a closed pipe does.)"""
    try:
        return pipe.recv()
    except (EOFError, ConnectionError) as error:
        raise OwnerGone from error


def _give(store: Store, learner: TorchLearner, asked: Connection, obeyed: Obeyed) -> None:
    """Parts of files, until the owner ends."""
    ranks = learner.ranks
    assert isinstance(ranks, GlooRanks)
    with _ending(store, ranks.rank):
        while True:
            ask: Ask = _next(asked)
            obeyed.wait_for(ask.after, ranks.seconds)
            assert isinstance(learner, ShardedLearner)
            data = learner.gather(ask.file, ask.to)
            if ask.to == ranks.rank:
                Thread(target=_stage, args=(store, ranks, ask, data), daemon=True).start()
            del data  # while the next one is waited for


def _stage(store: Store, ranks: GlooRanks, ask: Ask, data: Data) -> None:
    """Store a file that was gathered here."""
    assert ask.place is not None
    with _ending(store, ranks.rank):
        stage(ranks, ask.place, data)


@contextlib.contextmanager
def _ending(store: Store, rank: int) -> Iterator[None]:
    """How the process ends, by what its work raises."""
    try:
        yield
    except OwnerGone:
        return
    except Lost:
        with contextlib.suppress(RuntimeError):
            store.set(gone(rank), "")
        os._exit(LOST)  # at once: whoever is to blame is looked for among those that do not end so
    except Exception as error:  # noqa: BLE001 - whatever it is, the first rank says it
        with contextlib.suppress(RuntimeError):  # nobody is there to read it
            store.set(failed(rank), f"{type(error).__name__}: {error}".partition("\n")[0])
        os._exit(FAILED)


def _obey(learner: TorchLearner, ranks: GlooRanks, order: Call | Load | Step) -> None:
    match order:
        case Call():
            getattr(learner, order.name)(*order.given)
        case Load():
            weights, state = (
                ((name, received(ranks, n)) for name, n in part.items()) for part in (order.weights, order.state)
            )
            learner.take(weights, state)  # each file as it comes
            learner.width, learner.blank = order.width, False
        case Step():
            with contextlib.suppress(NotFinite, Stopped):  # the first rank says it
                batch = TrajectoryBatch.from_bytes(bytes(received(ranks, order.size)))
                learner.step(batch, order.version, partial(told, ranks))


def sent(ranks: GlooRanks, data: Data) -> None:
    """Give bytes to the other ranks; of them no more is copied than a chunk."""
    for chunk in _chunks(data):
        ranks.from_first(torch.frombuffer(chunk, dtype=torch.uint8))


def received(ranks: GlooRanks, size: int) -> memoryview:
    """Bytes that the first rank gives."""
    data = bytearray(size)
    for begin in range(0, size, CHUNK):
        ranks.from_first(torch.frombuffer(data, dtype=torch.uint8, count=min(CHUNK, size - begin), offset=begin))
    return memoryview(data)


def _chunks(data: Data) -> Iterator[bytearray]:
    """All of its bytes, `CHUNK` at a time."""
    chunk = bytearray()
    for piece in pieces(data):
        for begin in range(0, len(piece), CHUNK):
            chunk += piece[begin : begin + CHUNK]
            if len(chunk) >= CHUNK:
                yield chunk[:CHUNK]
                chunk = chunk[CHUNK:]
    if chunk:
        yield chunk


def ready(rank: int) -> str:
    """Where a rank says that it can meet the others."""
    return f"ready/{rank}"


def gone(rank: int) -> str:
    """Where a rank says that it ends because another one did."""
    return f"gone/{rank}"


def failed(rank: int) -> str:
    """Where a rank says why it failed."""
    return f"failed/{rank}"


def _end_with_owner() -> None:
    """See the module's docstring; an interrupt is the owner's to act on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform.startswith("linux"):
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The process that this one was forked from lives while anybody holds this pipe: only the owner is to.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]


def _be_named(name: str) -> None:
    """What `top` shows, for whoever looks; its first 15 bytes."""
    if sys.platform.startswith("linux"):
        _prctl(PR_SET_NAME, name.encode())


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
