"""Implements ranks (training processes) that add up tensors on CPUs with gloo, and gradients on GPUs with NCCL. torch's
DistributedDataParallel (DDP) is not used for three reasons. DDP averages gradients, but a learner needs their sum,
because its losses are weighted over the whole minibatch. DDP hooks into the forward pass of the whole model, but a
learner runs the decoder and the head separately. DDP waits for a backward pass of every rank, but a rank may have no
rows to train on.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

from rollflow.tasks.learners.distributed.load_balance import deal_pieces, measure_imbalance
from rollflow.tasks.learners.distributed.rank_gpus import begin_backend
from rollflow.tasks.learners.distributed.ranks import Piece, RankLost, Ranks

HOST = "127.0.0.1"  # default address, for ranks that all run on one machine
BUCKET = 2**23  # largest number of float32 elements in one all-reduce (32 MiB)
STORE_SECONDS = 60.0  # longest wait, in seconds, for an answer of the TCP store
START_SECONDS = 120.0  # longest time, in seconds, for which started ranks wait for each other


class GlooRanks(Ranks):
    """One of several ranks (processes) that communicate by gloo."""

    def __init__(
        self,
        store: Store,
        rank: int,
        count: int,
        seconds: float,
        check: Callable[[], None] = lambda: None,
        name: str = "group",
        host: str = HOST,
    ) -> None:
        """Join a process group of ranks; all ranks of the group must join at about the same time.

        `seconds` is the time limit of each collective call. `name` distinguishes this process group from other process
        groups of the same ranks. `host` is the address of this rank for the other ranks.
        """
        self.rank, self.count, self._check = rank, count, check
        self.store, self._name, self.host = store, name, host
        self._group: Any = ProcessGroupGloo(PrefixStore(name, store), rank, count, _group_options(host))
        # a second process group of the same ranks, for communication during a train step
        self.beside: GlooRanks | None = None
        self._bound = timedelta(seconds=seconds)
        self.seconds = seconds
        self._done = 0
        self._loads = np.zeros(count)

    def select_own(self, pieces: list[Piece], length: Callable[[Piece], int]) -> list[Piece]:
        """See `Ranks`."""
        lengths = [length(piece) for piece in pieces]
        dealt = deal_pieces(lengths, self.count)
        self._loads += [sum(lengths[piece] for piece in own) for own in dealt]
        return [pieces[piece] for piece in dealt[self.rank]]

    def add(self, found: Tensor) -> None:
        """See `Ranks`."""
        if found.numel():
            self._call_collective(lambda: self._group.allreduce(found, timeout=self._bound).wait())

    @torch.no_grad()
    def add_gradients(self, parameters: Iterable[nn.Parameter], loss: float) -> float:
        """See `Ranks`."""
        given = list(parameters)
        found = torch.tensor([loss, *(parameter.grad is not None for parameter in given)], dtype=torch.float64)
        self.add(found)
        changed = [parameter for parameter, ranks in zip(given, found[1:].tolist(), strict=True) if ranks]
        for bucket in _split_buckets(changed):
            self._add_bucket(bucket)
        return float(found[0])

    def gather_all(self, found: np.ndarray) -> list[np.ndarray]:
        """See `Ranks`."""
        counts = torch.zeros(self.count, dtype=torch.float64)
        counts[self.rank] = len(found)
        self.add(counts)
        every = [int(count) for count in counts]
        flat = torch.zeros(sum(every), dtype=torch.float64)
        parts = torch.split(flat, every)
        parts[self.rank].copy_(torch.from_numpy(found))
        self.add(flat)
        return [part.numpy() for part in parts if len(part)]

    def check(self) -> None:
        """See `Ranks`."""
        self._check()

    def take_metrics(self) -> dict[str, float]:
        """See `Ranks`."""
        found, self._loads = {"rank_imbalance": measure_imbalance(self._loads.tolist())}, np.zeros(self.count)
        return found

    def broadcast(self, data: Tensor) -> None:
        """Broadcast the contents of `data` on the first rank into `data` on the other ranks."""
        self._call_collective(lambda: self._group.broadcast(data, 0, timeout=self._bound).wait())

    def gather_to(self, rank: int, own: Tensor, parts: Sequence[Tensor]) -> None:
        """Copy the tensor `own` of each rank into `parts` on rank `rank`; each rank sends its tensor in one message."""
        if self.rank != rank:
            self._call_collective(lambda: self._send_own(own, rank))
            return
        parts[rank].copy_(own)
        self._call_collective(lambda: self._receive_parts(parts))

    def find_late(self) -> list[int]:
        """Return the ranks that have begun fewer collective calls than this rank. These ranks may have caused a
        failure.
        """
        found = [rank for rank in range(self.count) if rank != self.rank and self._count_calls(rank) < self._done]
        return found or (self.beside.find_late() if self.beside else [])

    def open_beside(self) -> None:
        """Create the second process group, `beside`; all ranks must call this method at the same time."""
        self.beside = GlooRanks(self.store, self.rank, self.count, self.seconds, self._check, "beside", self.host)

    def _count_calls(self, rank: int) -> int:
        """Return how many collective calls a rank has begun."""
        return int(self.store.get(self._calls_key(rank))) if self.store.check([self._calls_key(rank)]) else 0

    def _calls_key(self, rank: int) -> str:
        """Return the key of the TCP store under which a rank counts its collective calls."""
        return f"{self._name}/at/{rank}"

    def _send_own(self, own: Tensor, rank: int) -> None:
        if own.numel():
            self._group.send([own], rank, 0).wait(self._bound)

    def _receive_parts(self, parts: Sequence[Tensor]) -> None:
        for rank, part in enumerate(parts):
            if rank != self.rank and part.numel():
                self._group.recv([part], rank, 0).wait(self._bound)

    def _add_bucket(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace the gradients of a bucket by their sums over all ranks, computed in float32. A rank without a
        gradient adds zeros."""
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([grad.reshape(-1).float() for grad in found])
        if flat.is_cuda:
            self._call_collective(lambda: self._on_gpus.allreduce(flat, timeout=self._bound).wait())
        else:
            self.add(flat)
        for parameter, part in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter)

    @cached_property
    def _on_gpus(self) -> Any:
        """The NCCL process group for tensors on GPUs. All ranks must read `_on_gpus` at the same time."""
        from torch.distributed import ProcessGroupNCCL  # builds of torch without CUDA do not have this class

        begin_backend(torch.device("cuda"), self.host, blocking=True)
        options = ProcessGroupNCCL.Options()
        options._timeout = self._bound
        return ProcessGroupNCCL(PrefixStore(f"{self._name}/nccl", self.store), self.rank, self.count, options)

    def _call_collective(self, work: Callable[[], object]) -> None:
        self._done += 1
        try:
            self.store.set(self._calls_key(self.rank), str(self._done))
            work()
        except RuntimeError as error:
            raise RankLost(str(error)) from error


def serve_store(host: str = HOST) -> TCPStore:
    """Open the TCP store through which a group of ranks exchanges keys; the store listens on `host` only."""
    listening = socket.create_server((host, 0))
    port, bound = listening.getsockname()[1], timedelta(seconds=STORE_SECONDS)
    fd = listening.detach()  # from this line on, the TCP store owns the socket
    return TCPStore(host, port, is_master=True, timeout=bound, wait_for_workers=False, master_listen_fd=fd)


def connect_store(host: str, port: int) -> Store:
    """Connect to the TCP store that the first rank opened."""
    return TCPStore(host, port, timeout=timedelta(seconds=STORE_SECONDS), wait_for_workers=False)


def _group_options(host: str) -> Any:
    """Return the options of a gloo process group whose members listen on `host` only."""
    found = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    found._devices = [ProcessGroupGloo.create_device(hostname=host)]
    found._timeout = timedelta(seconds=START_SECONDS)
    return found


def _split_buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Split parameters into buckets of at most `BUCKET` elements; one all-reduce adds up one bucket."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        if bucket and sum(p.numel() for p in bucket) + parameter.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
