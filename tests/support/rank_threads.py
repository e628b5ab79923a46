"""Runs ranks as threads of this process. They compute the same sums as processes, but no process has to be started."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch.distributed import HashStore

from rollflow.tasks.learners.distributed.gloo_ranks import GlooRanks
from rollflow.tasks.learners.distributed.ranks import Ranks

SECONDS = 60.0
Found = TypeVar("Found")


def on_ranks(count: int, work: Callable[[Ranks], Found], seconds: float = SECONDS) -> list[Found]:
    """Return the result of `work` on each rank."""
    if count == 1:
        return [work(Ranks())]
    store = HashStore()
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda rank: work(GlooRanks(store, rank, count, seconds)), range(count)))
