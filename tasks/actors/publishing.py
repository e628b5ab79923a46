"""Publishing: a thread publishes a version from the learner's own tensors while the next version is trained.

    step v --> check --> [ hash, upload --> commit v + 1 --> acknowledge batch v --> prune ]    the thread
                  +----> lease batch v + 1 --> forward, backward --> settle --> optimizer's step

- Nothing is copied: the next step does not change the tensors before it has called `settle`, on all ranks. It waits
  only if the store takes longer than its forward and backward passes.
- One version at a time is published; the next one starts after it is committed.
- Every `settle` raises the error of a failed publishing until `forget` is called, so nothing is built on a version that
  does not exist.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class Publishing:
    """Publishes versions in a thread. See the module's docstring. Only one thread may use it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "publisher")
        self._job: Future[None] | None = None

    def begin(self, job: Callable[[], None]) -> None:
        """Start publishing a version, after waiting for the previous one as `settle` does."""
        self.settle()
        self._job = self._thread.submit(job)

    def settle(self) -> None:
        """Wait until the last version is published; raise the error if publishing failed."""
        if self._job is not None:
            self._job.result()

    def forget(self) -> None:
        """Wait until publishing has ended, and drop its error: nothing will be built on that version."""
        if self._job is not None:
            wait([self._job])
            self._job = None
