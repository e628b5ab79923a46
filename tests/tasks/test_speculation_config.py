"""Tests the config keys of speculative decoding, the counts of drafts, and the feed of past responses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollflow.storage.errors import EngineFailed
from rollflow.tasks.engines.base import DraftCounts
from rollflow.tasks.engines.config import VllmEngineConfig
from rollflow.tasks.engines.meter import EngineMeter
from rollflow.tasks.engines.speculation import PastFeed, PastResponse, build_speculation, drafts_from_past

COUNTS = st.builds(DraftCounts, *[st.integers(0, 9)] * 3)


@given(st.sampled_from(["none", "ngram", "suffix"]), st.integers(1, 64))
def test_vllm_gets_the_configured_kind_of_drafts(kind: str, most: int) -> None:
    config = VllmEngineConfig.model_validate({"kind": "vllm", "speculation": kind, "draft_tokens": most})
    made = build_speculation(config)
    if kind == "none":
        assert made == {}
        return
    speculative = made["speculative_config"]
    assert speculative["num_speculative_tokens"] == most
    assert speculative["method"] == {"ngram": "ngram", "suffix": "custom_class"}[kind]
    assert drafts_from_past(config) == (kind == "suffix")


@pytest.mark.parametrize(("key", "value"), [("speculation", "mtp"), ("draft_tokens", 0), ("draft_tokens", 65)])
def test_invalid_speculation_value_is_refused(key: str, value: object) -> None:
    with pytest.raises(ValidationError, match=key):
        VllmEngineConfig.model_validate({"kind": "vllm", key: value})


@given(st.lists(COUNTS))
def test_meter_adds_the_counts_of_drafts(drawn: list[DraftCounts]) -> None:
    meter = EngineMeter()
    for one in drawn:
        meter.count_drafts(one)
    found = meter.read().drafts
    assert found == DraftCounts(
        sum(one.verified for one in drawn), sum(one.drafted for one in drawn), sum(one.accepted for one in drawn)
    )
    assert found.length * max(found.verified, 1) == pytest.approx(max(found.verified, 1) + found.accepted)


async def test_feed_of_past_responses_runs_one_read_at_a_time() -> None:
    passed: list[Sequence[PastResponse]] = []
    reads = iter([[(b"p", b"a")], [(b"p", b"b")]])

    async def remember(past: Sequence[PastResponse]) -> None:
        passed.append(past)

    feed = PastFeed(lambda: next(reads), remember)
    feed.refresh()
    feed.refresh()  # the first read is still running
    while not passed:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    feed.refresh()
    while len(passed) < 2:
        await asyncio.sleep(0.001)
    assert passed == [[(b"p", b"a")], [(b"p", b"b")]]
    PastFeed(None, remember).refresh()


async def test_feed_of_past_responses_ignores_a_dead_engine() -> None:
    async def remember(past: Sequence[PastResponse]) -> None:
        raise EngineFailed("the engine died")

    feed = PastFeed(list, remember)
    feed.refresh()
    assert feed._running is not None
    await feed._running
