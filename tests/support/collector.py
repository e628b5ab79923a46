"""An OpenTelemetry collector that keeps the spans it gets: OTLP over HTTP, in a thread of this process."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Received:
    """A span as it arrived; times are seconds since the epoch."""

    service: str
    trace: bytes
    id: bytes
    parent: bytes  # the id of the parent span; empty for a root span
    name: str
    began: float
    ended: float
    attributes: dict[str, str | int | float]


class Collector:
    """The spans that arrived."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.address = ""

    def traces(self) -> list[Sequence[Received]]:
        """Group the spans by trace, the root span first."""
        found: defaultdict[bytes, list[Received]] = defaultdict(list)
        for span in self.spans:
            found[span.trace].append(span)
        return [sorted(spans, key=lambda span: (bool(span.parent), span.began)) for spans in found.values()]

    def take(self, data: bytes) -> None:
        """Keep the spans of one request."""
        for group in ExportTraceServiceRequest.FromString(data).resource_spans:
            service = next(one.value.string_value for one in group.resource.attributes if one.key == "service.name")
            for scope in group.scope_spans:
                for span in scope.spans:
                    values = {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}
                    times = span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9
                    found = Received(
                        service, span.trace_id, span.span_id, span.parent_span_id, span.name, *times, values
                    )
                    self.spans.append(found)


@contextlib.contextmanager
def collector(delay: threading.Event | None = None) -> Iterator[Collector]:
    """Run a collector on loopback; with `delay` it answers no request before this event is set."""
    kept = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            if delay is not None:
                delay.wait(60)
            kept.take(data)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    kept.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield kept
    finally:
        if delay is not None:
            delay.set()
        server.shutdown()
        server.server_close()
        thread.join()
