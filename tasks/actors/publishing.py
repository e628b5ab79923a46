"""Publishes a policy version from the learner's own tensors in a thread, while the next version is trained.

    step v --> check --> [ hash, upload --> commit v + 1 --> acknowledge batch v --> prune ]    the thread
                  +----> lease batch v + 1 --> forward, backward --> settle --> optimizer's step

- No tensor is copied: the next step calls `settle` on all ranks before it changes a tensor. The next step waits only if
  the store takes longer than the forward and backward passes of that step.
- One version at a time is published.
- If publishing failed, every call of `settle` raises the error until `forget` is called.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class Publishing:
    """Publishes policy versions in a background thread; only one thread may call its methods."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "publisher")
        self._job: Future[None] | None = None

    def begin(self, job: Callable[[], None]) -> None:
        """Wait until the previous policy version is published, and start publishing the next one."""
        self.settle()
        self._job = self._thread.submit(job)

    def settle(self) -> None:
        """Wait until the newest policy version is published; raise the error if publishing failed."""
        if self._job is not None:
            self._job.result()

    def forget(self) -> None:
        """Wait until publishing has ended, and ignore its error."""
        if self._job is not None:
            wait([self._job])
            self._job = None
