"""A call that may hang, for somebody who does not wait for it: a store that accepts connections and says nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from rollflow.storage.errors import Unreachable

T = TypeVar("T")


def call_in_time(call: Callable[[], T], seconds: float, what: str) -> T:
    """What `call` returns or raises. It runs in a thread that is left behind where it takes longer.

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
