"""User-defined scorers in every allowed form. The reference of a response says what the scorer does with the
response.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rollflow.storage.records import Outcome
from rollflow.tasks.scorers.base import Score
from rollflow.tasks.scorers.token_values import split_steps

Reference = Mapping[str, Any]
PARTS = {"answer": 0.5, "length": 0.25}
_here = 0  # number of responses that `meet` is scoring now


def one(response: str, reference: Reference) -> Score:
    """Score one response."""
    return _score(reference)


def number(response: str, reference: Reference) -> float:
    """Score one response by a number."""
    return float(response == reference["answer"])


async def later(response: str, reference: Reference) -> Score:
    """Score one response, after a moment."""
    await asyncio.sleep(reference.get("sleep", 0))
    if reference.get("cancels"):
        raise asyncio.CancelledError
    if reference.get("exits"):
        await asyncio.gather(_exit())
    return _score({**reference, "sleep": 0})


def several(responses: Sequence[str], references: Sequence[Reference]) -> list[Score]:
    """Score several responses in one call."""
    return [_score(reference) for reference in references]


async def several_later(responses: Sequence[str], references: Sequence[Reference]) -> list[Score]:
    """Score several responses in one call, after a moment."""
    await asyncio.sleep(max(reference.get("sleep", 0) for reference in references))
    return [_score({**reference, "sleep": 0}) for reference in references]


async def _exit() -> None:
    raise SystemExit(0)


async def meet(response: str, reference: Reference) -> float:
    """Score a response once `reference["of"]` responses are being scored at the same time."""
    global _here
    _here += 1
    while _here < reference["of"]:
        await asyncio.sleep(0.01)
    return 1.0


def count(responses: Sequence[str], references: Sequence[Reference]) -> list[float]:
    """Score each response by the number of responses in the call; one score is missing if there are many."""
    return [len(responses) / 100] * (len(responses) - (len(responses) > 16))


def _score(reference: Reference) -> Score:
    time.sleep(reference.get("sleep", 0))
    if reference.get("raises"):
        raise LookupError("no such answer")
    if reference.get("dies"):
        os._exit(3)
    return Score(0.75, "close", Outcome.PARTIAL, PARTS)


def steps(response: str, reference: Reference) -> Score:
    """Give each line of a response the value 0.5."""
    return Score(1.0, step_values=[(end, 0.5) for end, _ in split_steps(response, "\n")])


async def steps_later(response: str, reference: Reference) -> Score:
    """Give each line of a response the value 0.5."""
    return steps(response, reference)


def steps_of_several(responses: Sequence[str], references: Sequence[Reference]) -> list[Score]:
    """Give each line of each response the value 0.5."""
    return list(map(steps, responses, references))


def each_token(response: str, reference: Reference, tokens: Sequence[int]) -> Score:
    """Give each token of a response the value 0.25."""
    return Score(1.0, token_values=[0.25] * len(tokens))


async def each_token_later(response: str, reference: Reference, tokens: Sequence[int]) -> float | Score:
    """Give each token of a response the value 0.25."""
    return each_token(response, reference, tokens)


def each_token_of_several(
    responses: Sequence[str], references: Sequence[Reference], tokens: Sequence[Sequence[int]]
) -> list[Score]:
    """Give each token of each response the value 0.25."""
    return [each_token(*one) for one in zip(responses, references, tokens, strict=True)]


def optional_tokens(response: str, reference: Reference, tokens: int = 2) -> float:
    """Return the value of an option that has the name `tokens`, like the argument for the tokens of a response."""
    return float(tokens)


def one_token_value(response: str, reference: Reference) -> Score:
    """Give a value for only one token, no matter how long the response is."""
    return Score(1.0, token_values=[0.25])


def wrong(response: str, reference: Reference) -> Score:
    """Judge every response as wrong."""
    return Score(0.0)
