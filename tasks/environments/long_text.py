"""Runs work on long texts in a thread, so that one long text does not delay the other episodes of an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
LONG = 10_000  # number of characters; shorter texts are tokenized within milliseconds


async def compute_apart(texts: Iterable[str], compute: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """Call a function that works on `texts`, in a thread if the texts are long; return its result."""
    if sum(map(len, texts)) < LONG:
        return compute(*arguments, **options)
    return await asyncio.to_thread(compute, *arguments, **options)
