"""Calls that may hang, with a deadline: a store may accept connections and answer nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from rollflow.storage.errors import Unreachable

T = TypeVar("T")


def call_in_time(call: Callable[[], T], seconds: float, what: str) -> T:
    """Return what `call` returns, or raise what it raises. If it takes too long, its thread is left behind.

    Raises:
        Unreachable: it took longer than `seconds`; `what` did not answer.
    """
    made: list[T] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            made.append(call())
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            raised.append(error)

    thread = threading.Thread(target=work, name=f"ask {what}", daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not made:
        raise Unreachable(f"{what} did not answer within {seconds:g} s")
    return made[0]
