"""Ranks whose sums are gloo's, and of gradients on GPUs NCCL's.

torch's own wrapper (DistributedDataParallel) is not used. It gives the mean over ranks, where our losses are weighed
over the whole minibatch; it hooks into the model's forward, where we run decoder and head apart; and it waits for a
backward pass of each rank, where one may have no rows.
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

from rollflow.tasks.learners.dealing import deal, imbalance
from rollflow.tasks.learners.rank_gpus import begin_backend
from rollflow.tasks.learners.ranks import Lost, Piece, Ranks

HOST = "127.0.0.1"  # of ranks that are processes of one machine
BUCKET = 2**23  # numbers that are added up at a time: 32 MiB
STORE_SECONDS = 60.0  # that an answer of their store may take
START_SECONDS = 120.0  # for ranks that are all there to find each other


class GlooRanks(Ranks):
    """One of several ranks, by gloo. See `ranks`."""

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
        """All ranks of a group come here at about the same time; `seconds` bound what they do together from then on.

        `name`: of the group, where the same ranks have several. `host`: where the others reach this one.
        """
        self.rank, self.count, self._check = rank, count, check
        self.store, self._name, self.host = store, name, host
        self._group: Any = ProcessGroupGloo(PrefixStore(name, store), rank, count, _options(host))
        self.beside: GlooRanks | None = None  # the same ranks, for what they do beside a step
        self._bound = timedelta(seconds=seconds)
        self.seconds = seconds
        self._done = 0
        self._loads = np.zeros(count)

    def own(self, pieces: list[Piece], length: Callable[[Piece], int]) -> list[Piece]:
        """See `Ranks`."""
        lengths = [length(piece) for piece in pieces]
        dealt = deal(lengths, self.count)
        self._loads += [sum(lengths[piece] for piece in own) for own in dealt]
        return [pieces[piece] for piece in dealt[self.rank]]

    def add(self, found: Tensor) -> None:
        """See `Ranks`."""
        if found.numel():
            self._together(lambda: self._group.allreduce(found, timeout=self._bound).wait())

    @torch.no_grad()
    def add_gradients(self, parameters: Iterable[nn.Parameter], loss: float) -> float:
        """See `Ranks`."""
        given = list(parameters)
        found = torch.tensor([loss, *(parameter.grad is not None for parameter in given)], dtype=torch.float64)
        self.add(found)
        changed = [parameter for parameter, ranks in zip(given, found[1:].tolist(), strict=True) if ranks]
        for bucket in _buckets(changed):
            self._add_bucket(bucket)
        return float(found[0])

    def gathered(self, found: np.ndarray) -> list[np.ndarray]:
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

    def told(self) -> dict[str, float]:
        """See `Ranks`."""
        found, self._loads = {"rank_imbalance": imbalance(self._loads.tolist())}, np.zeros(self.count)
        return found

    def from_first(self, data: Tensor) -> None:
        """Put what the first rank has in its place."""
        self._together(lambda: self._group.broadcast(data, 0, timeout=self._bound).wait())

    def to_one(self, rank: int, own: Tensor, parts: Sequence[Tensor]) -> None:
        """On one rank, put what each has as its `own` into the place of its part; all of them in one piece."""
        if self.rank != rank:
            self._together(lambda: self._sent(own, rank))
            return
        parts[rank].copy_(own)
        self._together(lambda: self._received(parts))

    def behind(self) -> list[int]:
        """Ranks that have not come as far as this one; to be asked after a failure."""
        found = [rank for rank in range(self.count) if rank != self.rank and self._came(rank) < self._done]
        return found or (self.beside.behind() if self.beside else [])

    def go_beside(self) -> None:
        """Begin to have `beside`; work of all ranks."""
        self.beside = GlooRanks(self.store, self.rank, self.count, self.seconds, self._check, "beside", self.host)

    def _came(self, rank: int) -> int:
        """How often a rank has come to do something together."""
        return int(self.store.get(self._at(rank))) if self.store.check([self._at(rank)]) else 0

    def _at(self, rank: int) -> str:
        """Where a rank says how often it has come to do something together."""
        return f"{self._name}/at/{rank}"

    def _sent(self, own: Tensor, rank: int) -> None:
        if own.numel():
            self._group.send([own], rank, 0).wait(self._bound)

    def _received(self, parts: Sequence[Tensor]) -> None:
        for rank, part in enumerate(parts):
            if rank != self.rank and part.numel():
                self._group.recv([part], rank, 0).wait(self._bound)

    def _add_bucket(self, parameters: Sequence[nn.Parameter]) -> None:
        """In float32, whatever type they have; a rank without a gradient adds zeros."""
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([grad.reshape(-1).float() for grad in found])
        if flat.is_cuda:
            self._together(lambda: self._on_gpus.allreduce(flat, timeout=self._bound).wait())
        else:
            self.add(flat)
        for parameter, part in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter)

    @cached_property
    def _on_gpus(self) -> Any:
        """The group for what is on GPUs; all ranks come here together."""
        from torch.distributed import ProcessGroupNCCL  # not in torch for CPUs

        begin_backend(torch.device("cuda"), self.host, blocking=True)
        options = ProcessGroupNCCL.Options()
        options._timeout = self._bound
        return ProcessGroupNCCL(PrefixStore(f"{self._name}/nccl", self.store), self.rank, self.count, options)

    def _together(self, work: Callable[[], object]) -> None:
        self._done += 1
        try:
            self.store.set(self._at(self.rank), str(self._done))
            work()
        except RuntimeError as error:
            raise Lost(str(error)) from error


def first_store(host: str = HOST) -> TCPStore:
    """Where the ranks find each other, and say how far they are; whoever reaches `host` can reach it."""
    listening = socket.create_server((host, 0))
    port, bound = listening.getsockname()[1], timedelta(seconds=STORE_SECONDS)
    fd = listening.detach()  # the store's from now on
    return TCPStore(host, port, is_master=True, timeout=bound, wait_for_workers=False, master_listen_fd=fd)


def store_at(host: str, port: int) -> Store:
    """The first rank's, for another one."""
    return TCPStore(host, port, timeout=timedelta(seconds=STORE_SECONDS), wait_for_workers=False)


def _options(host: str) -> Any:
    """Of a group whose members listen at their hosts, and nowhere else."""
    found = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    found._devices = [ProcessGroupGloo.create_device(hostname=host)]
    found._timeout = timedelta(seconds=START_SECONDS)
    return found


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters in their order, some at a time."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        if bucket and sum(p.numel() for p in bucket) + parameter.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
