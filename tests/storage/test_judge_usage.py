"""Tests of the record of a judge's use: stored numbers are read back, and a damaged record counts as no use."""

from __future__ import annotations

import uuid

import pytest

from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.run_records.judge_usage import JudgeUsage, judge_usage_path, read_judge_usage


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


def test_stored_judge_usage_is_read_back(store: MemoryStore) -> None:
    used = JudgeUsage(3, 2, 700)
    store.put(judge_usage_path("reward.parts.style.scorer"), used.encode())
    assert read_judge_usage(store, "reward.parts.style.scorer") == used
    assert read_judge_usage(store, "reward") == JudgeUsage()


@pytest.mark.parametrize("record", [b"", b"{", b"[]", b'{"tokens": -1}', b'{"tokens": "many"}', b'{"tokens": NaN}'])
def test_damaged_judge_usage_record_counts_as_zero(store: MemoryStore, record: bytes) -> None:
    store.put(judge_usage_path("reward"), record)
    assert read_judge_usage(store, "reward") == JudgeUsage()
