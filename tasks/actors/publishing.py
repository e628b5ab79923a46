"""A version is published beside the training of the next: in a thread, from the learner's own tensors.

    step v --> check --> [ hash, upload --> commit v + 1 --> acknowledge batch v --> prune ]    the thread
                  +----> lease batch v + 1 --> forward, backward --> settle --> optimizer's step

- Nothing is copied: the next step leaves the tensors alone until it has settled, on all ranks. It waits only where the
  store takes longer than its forward and backward passes.
- One version at a time is on its way, and the next one is not begun before that one is committed.
- What failed is raised by every `settle` until it is dealt with: nothing goes on behind a version that is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class Publishing:
    """See the module's docstring. To be used by one thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "publisher")
        self._job: Future[None] | None = None

    def begin(self, job: Callable[[], None]) -> None:
        """Start to publish a version; raises as `settle`."""
        self.settle()
        self._job = self._thread.submit(job)

    def settle(self) -> None:
        """Wait until what was begun is published; raises what it failed with."""
        if self._job is not None:
            self._job.result()

    def forget(self) -> None:
        """Wait until what was begun has ended; what it failed with is dealt with: nobody goes on from that version."""
        if self._job is not None:
            wait([self._job])
            self._job = None
