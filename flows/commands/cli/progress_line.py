"""Shows the progress of a command on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

LINE_SECONDS = 10.0  # Seconds between two lines of progress if the output is not a terminal.


@contextmanager
def show_progress(first: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a text as the present progress. On a terminal, one line changes in place; any other
    output gets a new line every few seconds.
    """
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status(first) as line:
            yield line.update
    else:
        yield _print_now_and_then()


def _print_now_and_then() -> Callable[[str], None]:
    last = time.monotonic()

    def progress(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    return progress
