"""Counts events in the sandboxes of this process and of its child processes, for each kind of sandbox.

    child process --counters in shared memory--> its parent, the process of a Ray actor --status--> supervisor

A process and its parent share the memory of the counters, so that the counts of a killed process are not lost.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import lru_cache
from threading import Lock
from typing import Protocol, TypeVar

from rollflow.storage.run_records.sandbox_figures import BUCKETS, SandboxFigures, find_bucket
from rollflow.tasks.sandboxes.base import ProgramEnd, SandboxFailed, UserRefused

KINDS = ("bubblewrap", "sandlock", "unsafe-process", "run-code", "rock")


class Replacement(StrEnum):
    """Why a sandbox was replaced by a new one. If a program was killed at a limit, the reason has the name of the
    `ProgramEnd`.
    """

    TIMEOUT = ProgramEnd.TIMEOUT
    MEMORY = ProgramEnd.MEMORY
    PROCESSES = ProgramEnd.PROCESSES
    OUTPUT = ProgramEnd.OUTPUT
    FOLDER = ProgramEnd.FOLDER
    SIGNAL = "signal"  # the program ended by a signal
    CHILDREN = "children"  # the program was allowed to leave child processes behind
    STOPPED = "stopped"  # the caller did not wait for the program's end
    FAILED = "failed"  # the sandbox failed, or did not answer
    NOT_EMPTIED = "not emptied"  # the sandbox could not be emptied for the next program
    PARENT_ENDED = "parent ended"  # the process that creates the sandboxes ended, which ended all sandboxes


STOPPED = "stopped"  # the end of a program whose caller stopped waiting for it
ENDS = (*map(str, ProgramEnd), STOPPED)
REASONS = tuple(map(str, Replacement))
COUNTERS = ("started", "renewed", "failures", "in_use", "microseconds", *(f"end {end}" for end in ENDS), *REASONS)
PLACES = {name: place for place, name in enumerate(COUNTERS)}
FIRST_BUCKET = len(COUNTERS)
SIZE = FIRST_BUCKET + BUCKETS  # number of counters of one kind of sandbox
BYTES = 8 * SIZE * len(KINDS)
LONGEST_SECONDS = 86400.0  # largest counted time of a program, so that no sum exceeds 64 bits
_making = Lock()


class Ended(Protocol):
    """The result of a program, or of a piece of code in a session."""

    @property
    def end(self) -> ProgramEnd: ...

    @property
    def seconds(self) -> float: ...


Result = TypeVar("Result", bound=Ended)


class CounterBoard:
    """The counters of one process, 64 bits each, in memory that another process may share."""

    def __init__(self, fd: int = -1) -> None:
        """Use the memory of the open file `fd`; with -1, use memory of this process only."""
        self.cells = memoryview(mmap.mmap(fd, BYTES)).cast("q")


class ProcessFigures:
    """The counters of this process and of its child processes."""

    def __init__(self) -> None:
        self._board, self._children, self._lock = CounterBoard(), set[CounterBoard](), Lock()

    def add(self, place: int, count: int) -> None:
        """Add to a counter of this process."""
        with self._lock:
            self._board.cells[place] += count

    @contextmanager
    def open_child(self) -> Iterator[tuple[CounterBoard, int]]:
        """Open counters that a child process shares; return them with a file descriptor for the child process. The
        child process must be started inside the block, while the file descriptor is open.
        """
        fd = os.memfd_create("sandbox figures")
        try:
            os.ftruncate(fd, BYTES)
            board = CounterBoard(fd)
            yield board, fd
            with self._lock:
                self._children.add(board)
        finally:
            os.close(fd)

    def close_child(self, board: CounterBoard) -> None:
        """Add the counters of an ended child process, except that of sandboxes in use, to those of this process."""
        with self._lock:
            if board not in self._children:
                return
            self._children.remove(board)
            for place, count in enumerate(board.cells):
                if count and place % SIZE != PLACES["in_use"]:
                    self._board.cells[place] += count

    def share(self, fd: int) -> None:
        """Move the counts into the memory of an open file, which the parent process reads; close the file."""
        with self._lock:
            before, self._board = self._board, CounterBoard(fd)
            os.close(fd)
            for place, count in enumerate(before.cells):
                self._board.cells[place] += count

    def read(self) -> Mapping[str, SandboxFigures]:
        """Return the counts of each kind of sandbox that this process or its child processes have used."""
        with self._lock:
            boards = (self._board, *self._children)
            sums = [*map(sum, zip(*(board.cells.tolist() for board in boards), strict=True))]
        kinds = {kind: _build_figures(sums[place * SIZE :][:SIZE]) for place, kind in enumerate(KINDS)}
        return {kind: one for kind, one in kinds.items() if one.events}


def _build_figures(found: Sequence[int]) -> SandboxFigures:
    """Convert the counters of one kind of sandbox to a `SandboxFigures` record."""
    return SandboxFigures(
        started=found[PLACES["started"]],
        renewed=found[PLACES["renewed"]],
        replaced={reason: count for reason in REASONS if (count := found[PLACES[reason]])},
        ends={end: count for end in ENDS if (count := found[PLACES[f"end {end}"]])},
        failures=found[PLACES["failures"]],
        seconds=found[PLACES["microseconds"]] / 1e6,
        times={bucket: count for bucket, count in enumerate(found[FIRST_BUCKET:]) if count},
        in_use=max(0, found[PLACES["in_use"]]),
    )


def figures_of_process() -> ProcessFigures:
    """Return the counters of this process."""
    with _making:
        return _create_figures()


@lru_cache
def _create_figures() -> ProcessFigures:
    return ProcessFigures()


class KindCounter:
    """Counts events in this process's sandboxes of one kind."""

    def __init__(self, kind: str) -> None:
        self._figures, self._start = figures_of_process(), KINDS.index(kind) * SIZE

    def count_start(self) -> None:
        """Count a new sandbox."""
        self._add("started")

    def count_renewal(self) -> None:
        """Count a sandbox that was emptied for its next program."""
        self._add("renewed")

    def count_replacement(self, reason: Replacement) -> None:
        """Count a sandbox that was replaced by a new one."""
        self._add(reason)

    def note_use(self, change: int) -> None:
        """Record that one more sandbox is in use (`change` is 1), or one sandbox less (`change` is -1)."""
        self._add("in_use", change)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Record that a sandbox is in use during the block."""
        self.note_use(1)
        try:
            yield
        finally:
            self.note_use(-1)

    async def watch(self, running: Awaitable[Result]) -> Result:
        """Await a program, and count how it ended. A program's time may have any value, because a foreign server may
        have measured it.
        """
        try:
            found = await running
        except asyncio.CancelledError:
            self._add(f"end {STOPPED}")
            raise
        except SandboxFailed as error:
            if not isinstance(error, UserRefused):
                self._add("failures")
            raise
        seconds = min(max(0.0, found.seconds), LONGEST_SECONDS)  # NaN counts as 0
        self._add(f"end {found.end}")
        self._add("microseconds", round(1e6 * seconds))
        self._figures.add(self._start + FIRST_BUCKET + find_bucket(seconds), 1)
        return found

    def _add(self, name: str, count: int = 1) -> None:
        self._figures.add(self._start + PLACES[name], count)
