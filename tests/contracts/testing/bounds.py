"""Runs user code with bounds. If the code hangs or blocks, its test fails with a sentence, and pytest continues."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from types import FrameType
from typing import Any, TypeVar

import pytest

Result = TypeVar("Result")

HANG_SECONDS = 60.0  # longest wait for one call of user code; a bound on hangs, not on speed
SOCKET_CALLS = ("accept", "connect", "recv", "recv_into", "send", "sendall")


def call_bounded(call: Callable[[], Result], what: str, seconds: float = HANG_SECONDS) -> Result:
    """Return the result of `call`, which runs in a thread; fail if it has not returned after `seconds`."""
    results, errors = list[Result](), list[BaseException]()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread of the test
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        pytest.fail(f"{what} must return, and it has not returned after {seconds:g} s", pytrace=False)
    if errors:
        raise errors[0]
    return results[0]


def run_bounded(coroutine: Coroutine[Any, Any, Result], what: str, seconds: float = HANG_SECONDS) -> Result:
    """Run a coroutine in its own event loop and return the result; fail like `call_bounded` if the coroutine takes too
    long.
    """
    return call_bounded(lambda: asyncio.run(coroutine), what, seconds)


def list_blocking_calls(call: Callable[[], object]) -> list[str]:
    """Run `call` in this thread and return the calls that blocked the thread: sleep, and blocking sockets."""
    blocking = list[str]()

    def note(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and _is_blocking(function):
            blocking.append(f"{function.__qualname__} in {frame.f_code.co_qualname}")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return blocking


def _is_blocking(function: Any) -> bool:
    if function is time.sleep:
        return True
    owner = getattr(function, "__self__", None)
    return isinstance(owner, socket.socket) and function.__name__ in SOCKET_CALLS and owner.gettimeout() != 0.0


@contextlib.contextmanager
def assert_raises(kind: type[Exception], sentence: str, match: str = "") -> Iterator[None]:
    """Fail with the sentence unless the body raises an error of this kind whose text matches."""
    try:
        yield
    except kind as error:
        if not re.search(match, str(error)):
            pytest.fail(f"{sentence}, whose text matches {match!r}, but the text is {str(error)!r}")
    else:
        pytest.fail(sentence)


def reach_from_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes that rollflow starts import the same modules that this process can import."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if os.path.isabs(path)))


def import_keys(contract: type) -> Mapping[str, Any]:
    """Return the keys of a user-defined part's section; fail if the test class does not name the part."""
    path = getattr(contract, "path", "")
    if not path:
        pytest.fail(f'{contract.__name__} must name the part: path = "module:name", as in a recipe', pytrace=False)
    return {"path": path, "options": getattr(contract, "options", {})}
