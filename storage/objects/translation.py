"""Replaces errors of libraries and of the operating system by rollflow's errors."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType


class ErrorTranslator:
    """A context whose errors are replaced: `translate` returns the new error, or None if the error stays.

    A generator with `@contextmanager` could do the same. But since Python 3.12, the error of such a generator is in a
    reference cycle with the frames of all its callers. Their objects, such as locks and memory-mapped files, would
    exist until the next garbage collection.
    """

    def __init__(self, translate: Callable[[BaseException], Exception | None]) -> None:
        """Create the context."""
        self._translate = translate

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or (translated := self._translate(error)) is None:
            return
        try:
            raise translated from error
        finally:
            del translated  # the error's traceback contains this frame, which must not refer to the error
