"""Tests of `AsyncOnce`, a value that is computed once for all callers."""

from __future__ import annotations

import asyncio

import pytest

from rollflow.tasks.runtime.async_once import AsyncOnce


async def test_async_value_is_computed_once_for_all_callers() -> None:
    made: list[int] = []

    async def make() -> int:
        await asyncio.sleep(0)
        made.append(7)
        return made[-1]

    one = AsyncOnce(make)
    assert one.found is None
    assert await asyncio.gather(one.get(), one.get()) == [7, 7]
    assert (await one.get(), one.found, made) == (7, 7, [7])


async def test_async_value_is_computed_again_after_a_failure() -> None:
    errors = [ValueError("away"), None]

    async def make() -> str:
        if error := errors.pop(0):
            raise error
        return "there"

    one = AsyncOnce(make)
    with pytest.raises(ValueError, match="away"):
        await one.get()
    assert one.found is None
    assert await one.get() == "there"


async def test_cancelled_caller_stops_no_other_caller() -> None:
    going = asyncio.Event()

    async def make() -> bool:
        return await going.wait()

    one = AsyncOnce(make)
    first, second = (asyncio.create_task(one.get()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    going.set()
    assert await second
    assert first.cancelled()
