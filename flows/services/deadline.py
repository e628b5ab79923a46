"""Runs a function with a time limit, because a remote store may accept a connection and never answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from rollflow.storage.errors import Unreachable

T = TypeVar("T")


def call_in_time(call: Callable[[], T], seconds: float, what: str) -> T:
    """Run the function `call` in a thread for at most `seconds`; return its result or raise its error. If `call` takes
    too long, its thread keeps running in the background.

    Raises:
        Unreachable: `what` did not answer within `seconds`.
    """
    results: list[T] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            raised.append(error)

    thread = threading.Thread(target=work, name=f"ask {what}", daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not results:
        raise Unreachable(f"{what} did not answer within {seconds:g} s")
    return results[0]
