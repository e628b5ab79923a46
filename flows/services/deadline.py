"""Runs a call that may hang under a deadline, since a store may accept connections and never answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from rollflow.storage.errors import Unreachable

T = TypeVar("T")


def call_in_time(call: Callable[[], T], seconds: float, what: str) -> T:
    """Return the result of `call`, or raise its error. A call that takes too long leaves its thread behind.

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
