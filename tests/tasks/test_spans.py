"""Tests OpenTelemetry spans: each dispatch (one issue of a prompt) and each version has one complete trace, and a
collector never delays a run.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import GroupKey
from rollflow.tasks.rollout.config import FilterConfig
from rollflow.tasks.run.config import TrackingConfig
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.runtime.spans import Spans, build_provider, open_spans
from tests.support.collector import collector
from tests.support.counts import examples
from tests.support.log_runs import read
from tests.support.pipeline import Pipeline
from tests.support.small_run import GROUPS, prepare_small, train_small


def in_memory(share: float = 1.0) -> tuple[Spans, InMemorySpanExporter]:
    """Return a recorder of spans with the clock of the running event loop, and the exporter that stores the spans in
    memory.
    """
    provider, kept = build_provider({"service.name": "test"}), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    return Spans("run", provider, share, lambda: asyncio.get_running_loop().time()), kept


def by_dispatch(kept: InMemorySpanExporter) -> dict[GroupKey, list[ReadableSpan]]:
    """Group the spans by dispatch."""
    found: dict[GroupKey, list[ReadableSpan]] = {}
    for span in kept.get_finished_spans():
        assert span.attributes is not None
        key = GroupKey(*(int(str(span.attributes[f"rollflow.{part}"])) for part in ("prompt", "attempt")))
        found.setdefault(key, []).append(span)
    return found


def check_trace(spans: list[ReadableSpan]) -> str:
    """Check by ids and times that the spans are one tree; return the fate that the root span names."""
    (root,) = [span for span in spans if span.name == "prompt"]
    assert root.parent is None
    began, ended = times(root)
    for span in spans:
        assert span.get_span_context().trace_id == root.get_span_context().trace_id
        assert began - 1000 <= times(span)[0] <= times(span)[1] <= ended + 1000  # nanoseconds
        assert span is root or (span.parent and span.parent.span_id == root.get_span_context().span_id)
    return str((root.attributes or {})["fate"])


def times(span: ReadableSpan) -> tuple[int, int]:
    """Return the start and the end of a span in nanoseconds."""
    return span.start_time or 0, span.end_time or 0


@settings(max_examples=examples(200), deadline=None)
@given(
    seed=st.integers(0, 2**20),
    alpha=st.sampled_from([0.0, 1.0, 1.5, 2.0]),
    extra_groups=st.integers(0, 2),
    extra_responses=st.integers(0, 2),
    min_std=st.sampled_from([None, 0.0]),
    deaths=st.lists(st.tuples(st.floats(0, 3), st.integers(0, 1)), max_size=2),
)
def test_each_prompt_attempt_has_one_complete_trace(
    seed: int,
    alpha: float,
    extra_groups: int,
    extra_responses: int,
    min_std: float | None,
    deaths: list[tuple[float, int]],
) -> None:
    spans, kept = in_memory()
    choices: dict[str, object] = {"redundant_responses": extra_responses}
    if extra_groups:
        choices |= {"redundant_groups": extra_groups, "on_stale": "drop", "batch_order": "finished"}
    if min_std is not None:
        choices["filter"] = FilterConfig(min_std=min_std, max_consecutive=1000)
    pipeline = Pipeline(
        MemoryStore(uuid.uuid4().hex),
        seed=seed,
        async_ratio=alpha,
        engines=2,
        engine_deaths=tuple(deaths),
        choices=choices,
        spans=spans,
    )
    run_virtual(pipeline.run())
    found = by_dispatch(kept)
    fates = {key: check_trace(trace) for key, trace in found.items() if any(span.name == "prompt" for span in trace)}
    committed = [entry.body for entry in read(pipeline.store) if isinstance(entry.body, BatchCommitted)]
    trained = {group.key: f"trains version {body.number + 1}" for body in committed for group in body.groups}
    discarded = {d.key: f"discarded: {d.reason.value}" for body in committed for d in body.discards}
    assert fates.items() >= (trained | discarded).items()
    for key in trained:
        names = Counter(span.name for span in found[key])
        assert names == {"prompt": 1, "generate": pipeline.group_size, "score": pipeline.group_size, "wait": 1}


def test_all_processes_trace_the_same_prompts() -> None:
    kept = []
    for share in (0.25, 0.25, 1.0):
        spans, exporter = in_memory(share)

        async def record(spans: Spans = spans) -> None:
            for prompt in range(400):
                spans.record_prompt(GroupKey(prompt, 0), "prompt", 1.0)

        run_virtual(record())
        kept.append(set(by_dispatch(exporter)))
    assert kept[0] == kept[1] < kept[2]
    assert 60 <= len(kept[0]) <= 140  # 100 of 400 are expected, with a standard deviation of 9
    assert len(kept[2]) == 400


def test_policy_version_has_a_trace_and_a_span_in_its_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    with collector() as kept:
        context = prepare_small(tmp_path, versions=2, tracking={"spans": kept.address})
        train_small(context)
    traces = kept.traces()
    versions = [trace for trace in traces if trace[0].name == "version"]
    assert sorted(trace[0].attributes["rollflow.version"] for trace in versions) == [1, 2]
    for root, *parts in versions:
        assert [part.name for part in parts] == ["wait for batch", "train step", "publish"]
        assert all(part.parent == root.id for part in parts)
        assert root.service == "rollflow-learner"
        assert abs(sum(part.ended - part.began for part in parts) - (root.ended - root.began)) < 1e-3
    trains = [span for span in kept.spans if span.name == "train"]
    assert Counter(span.attributes["rollflow.version"] for span in trains) == {1: GROUPS, 2: GROUPS}
    assert len({span.trace for span in trains}) == 2 * GROUPS


@pytest.mark.parametrize("answers", [False, True], ids=["absent", "silent"])
def test_failing_span_collector_does_not_delay_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    monkeypatch.setattr("rollflow.tasks.runtime.spans.FLUSH_SECONDS", 0.5)
    with collector(threading.Event()) as kept:
        address = kept.address if answers else "http://127.0.0.1:9"
        context = prepare_small(tmp_path, versions=2, tracking={"spans": address})
        began = time.monotonic()
        actor = train_small(context)
        assert actor.version == 2
        assert time.monotonic() - began < 60
        assert not kept.spans


def test_run_without_a_collector_loads_no_opentelemetry_sdk() -> None:
    spans = open_spans(TrackingConfig().spans, 1.0, "key", "run", "learner")
    spans.record_version(1, "version", 1.0)
    spans.flush()
    assert not spans.on
