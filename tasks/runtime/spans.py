"""Records OpenTelemetry spans of a run, from each prompt to the policy version that was trained on it.

Spans are recorded only if the config key `tracking.spans` names a collector. Each attempt to answer a prompt, and each
policy version, has its own trace.

    prompt 17.0   |--------------------------------------------|           from its start to its commit or discard
      generate    |-----------|                                            one for each response that is kept
      score                   |---|
      wait                        |--------|                               until its batch is committed
      train                                   |----------------------|     until the version is published

    version 3     |----------------------------------------|               by the learner
      wait for batch, train step, publish
      load weights                                            |----|       by the engines

Processes share a trace without exchanging ids, because ids are hashes of the run and of the trace's name. A span is
recorded when it ends, so a killed process loses spans that it has not sent. A run never waits for the collector: a span
that cannot be sent is dropped.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rollflow.storage.records import GroupKey

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

EXPORT_SECONDS = 5.0  # longest time, in seconds, of one request to the collector, including retries
FLUSH_SECONDS = 10.0

Attribute = str | int | float | bool


class Spans:
    """Records the OpenTelemetry spans of one process, or nothing if `provider` is None."""

    def __init__(
        self,
        run: str = "",
        provider: TracerProvider | None = None,
        share: float = 1.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Store the arguments.

        Args:
            run: this text identifies the run. The ids of all traces are derived from this text.
            share: the spans of this share of the prompts (0 to 1) are recorded.
            clock: this function returns the seconds since the epoch.
        """
        self._run, self._provider, self._share, self._clock = run, provider, share, clock
        self._recording = threading.Lock()

    @property
    def on(self) -> bool:
        """True if spans are recorded."""
        return self._provider is not None

    def record_prompt(self, key: GroupKey, name: str, seconds: float, ago: float = 0.0, **more: Attribute) -> None:
        """Record a span in the trace of a prompt; the span "prompt" is the root of the trace."""
        if self._provider is not None:
            ids = _ids(self._run, f"prompt {key.prompt}.{key.attempt}")
            if ids[0] % 2**64 < self._share * 2**64:
                more |= {"rollflow.prompt": key.prompt, "rollflow.attempt": key.attempt}
                self._record(self._provider, ids, name, name == "prompt", seconds, ago, more)

    def record_version(self, version: int, name: str, seconds: float, ago: float = 0.0, **more: Attribute) -> None:
        """Record a span in the trace of a policy version; the span "version" is the root of the trace.

        The span lasted `seconds` and ended `ago` seconds before now. `more` has further attributes of the span.
        """
        if self._provider is not None:
            ids = _ids(self._run, f"version {version}")
            more |= {"rollflow.version": version}
            self._record(self._provider, ids, name, name == "version", seconds, ago, more)

    def _record(
        self,
        provider: TracerProvider,
        ids: tuple[int, int],
        name: str,
        root: bool,
        seconds: float,
        ago: float,
        attributes: dict[str, Attribute],
    ) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

        ended = int((self._clock() - ago) * 1e9)
        context = Context()
        if not root:
            parent = SpanContext(*ids, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
            context = set_span_in_context(NonRecordingSpan(parent), context)
        with self._recording:
            if root:
                provider.id_generator.reserve(*ids)  # type: ignore[attr-defined]
            tracer = provider.get_tracer("rollflow")
            span = tracer.start_span(name, context, attributes=attributes, start_time=ended - int(seconds * 1e9))
        span.end(ended)

    def flush(self) -> None:
        """Send the recorded spans to the collector, in at most `FLUSH_SECONDS`."""
        if self._provider is not None:
            # OpenTelemetry's time limit does not apply to a silent collector, so a separate thread is used.
            flushing = threading.Thread(target=self._provider.force_flush, name="spans", daemon=True)
            flushing.start()
            flushing.join(FLUSH_SECONDS)


def open_spans(collector: str | None, share: float, run: str, run_id: str, role: str) -> Spans:
    """Create the `Spans` object of one process of a run, which records nothing if `collector` is None.

    `collector` is the address of an OTLP receiver over HTTP (`http://host:4318`). `share` is the share of the prompts
    (0 to 1) whose spans are recorded, the same prompts in every process. `run` identifies the run, and `role` is the
    name of the process.
    """
    if collector is None:
        return Spans()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = build_provider({"service.name": f"rollflow-{role}", "rollflow.run": run_id})
    exporter = OTLPSpanExporter(f"{collector.rstrip('/')}/v1/traces", timeout=EXPORT_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Spans(run, provider, share)


def build_provider(attributes: Mapping[str, str]) -> TracerProvider:
    """Create an OpenTelemetry provider that gives reserved ids to root spans."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class ReservedIds(RandomIdGenerator):
        """Generates random ids for spans, but uses reserved ids for the next root span."""

        reserved: tuple[int, int] | None = None

        def reserve(self, trace_id: int, span_id: int) -> None:
            """Reserve a trace id and a span id for the next root span."""
            self.reserved = trace_id, span_id

        def generate_trace_id(self) -> int:
            """Return the reserved trace id, or a random one if none is reserved."""
            return self.reserved[0] if self.reserved else super().generate_trace_id()

        def generate_span_id(self) -> int:
            """Return the reserved span id the first time, and random ids afterwards."""
            reserved, self.reserved = self.reserved, None
            return reserved[1] if reserved else super().generate_span_id()

    return TracerProvider(  # a process that ends must not wait for the collector of spans
        resource=Resource.create(attributes), id_generator=ReservedIds(), shutdown_on_exit=False
    )


def _ids(run: str, trace: str) -> tuple[int, int]:
    """Derive the id of a trace and the id of the trace's root span from a text."""
    digest = hashlib.blake2b(f"{run}\n{trace}".encode(), digest_size=24).digest()
    return int.from_bytes(digest[:16], "big") or 1, int.from_bytes(digest[16:], "big") or 1
