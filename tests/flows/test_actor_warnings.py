"""Tests that a bounded number of an actor's warnings is kept, and that each is logged once on the run's page, without
secrets.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import pytest

from rollflow.flows.views.actor_warnings import ActorWarnings, without_secrets
from rollflow.tasks.runtime import actor_warnings as module
from rollflow.tasks.runtime.actor_warnings import AGAIN_SECONDS, KEPT, LENGTH, ActorWarning, Warnings, open_socket


@pytest.fixture
def kept() -> Iterator[Warnings]:
    logging.captureWarnings(False)  # an actor of another test may have left the capture of warnings on
    made = Warnings("learner")
    yield made
    for logger in (logging.getLogger(), logging.getLogger("proud")):
        logger.removeHandler(made)
    logging.captureWarnings(False)


def texts(kept: Warnings) -> list[str]:
    return [one.text for one in kept.read()]


def test_non_propagating_loggers_and_warnings_are_recorded(kept: Warnings) -> None:
    proud = logging.getLogger("proud")
    proud.propagate = False
    assert texts(kept) == []
    proud.warning("the head of %s is stale\nand so on", "a model")
    proud.info("nothing")
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("any.other").exception("no batch")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("slow path", stacklevel=1)
    first, second, third = texts(kept)
    assert (first, second) == ("the head of a model is stale", "no batch: ValueError('bad')")
    assert "UserWarning: slow path" in third


def test_repeated_warning_is_recorded_at_intervals(kept: Warnings, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    kept.read()
    for step in range(5):
        logging.warning("step %d was slow", step)
    assert texts(kept) == ["step 0 was slow"]
    now = AGAIN_SECONDS + 1
    logging.warning("step 9 was slow")
    assert texts(kept) == ["step 0 was slow", "step 9 was slow"]


def test_number_of_recorded_warnings_is_bounded(kept: Warnings, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    kept.read()
    for count in range(100):
        logging.warning("x" * count + "y")
    assert len(texts(kept)) == KEPT
    now = AGAIN_SECONDS + 1
    logging.warning("z" * 10_000)
    newest = kept.read()[-1]
    assert newest.text == "z" * LENGTH + f" (before it, {100 - KEPT} others were left out)"
    assert newest.number == KEPT + 1


def test_actor_warning_reported_twice_is_logged_once() -> None:
    said: list[str] = []
    told = ActorWarnings(lambda form, *given, extra: said.append(form % given + f" {extra}"))
    first, second = ActorWarning("learner", "a:1", 1, "odd"), ActorWarning("learner", "a:1", 2, "odder")
    told.tell([first])
    told.tell([first, second])
    told.tell([first, second, ActorWarning("learner", "a:2", 1, "odd", rank=1)])  # a warning of the restarted actor
    expected = [("odd", None), ("odder", None), ("odd", 1)]
    assert said == [f"learner warns: {text} {{'actor': 'learner', 'rank': {rank}}}" for text, rank in expected]


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("s3://key:word@host/bucket?sig=abc gave up", "s3://host/bucket gave up"),
        ("AWS_SECRET_ACCESS_KEY=abc, next", "AWS_SECRET_ACCESS_KEY=***, next"),
        ("{'api_token': 'abc'}", "{'api_token': ***"),
        ("Authorization: Bearer abc", "Authorization: ***"),
        ("4 tokens per second: 7", "4 tokens per second: 7"),
    ],
)
def test_warnings_contain_no_secrets(text: str, safe: str) -> None:
    assert without_secrets(text) == safe


@pytest.mark.parametrize("data", [b"", b"{", b"7", b'["who"]', b"\xff", b'{"a": 1}'])
def test_invalid_warning_is_ignored(data: bytes) -> None:
    """Warnings on the socket may be invalid, because a user-defined verifier has access to the socket."""
    kept = Warnings("reward")
    open_socket().send(data)
    open_socket().send(b'["a reward worker", null, "it is late"]')
    assert [one.text for one in kept.read()] == ["a reward worker: it is late"]
