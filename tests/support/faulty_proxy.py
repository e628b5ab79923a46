"""Runs an HTTP proxy on loopback that injects faults of networks and services into the answers of an object store.

If an answer is lost, the server has done the work, but the client's connection is closed. A test requests a number of
faults, or faults happen at random at given rates, from a generator with a seed.
"""

from __future__ import annotations

import enum
import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import urlsplit

from tests.support.waiting import HANG_SECONDS

SLOW_SECONDS = 0.3  # seconds that a slow body takes longer than a normal one


class Fault(enum.Enum):
    """The fault of one request."""

    THROTTLE = "503 SlowDown, nothing done"
    ERROR = "500 InternalError, nothing done"
    RESET = "the connection closes, nothing done"
    LOST = "the work is done, the connection closes in place of an answer"
    TRUNCATED = "the answer breaks off in the middle of its body"
    SLOW = "the body comes in drops"
    STALLED = "the body stops coming, the connection stays"
    FLIPPED = "one bit of the body is another"
    ALTERED = "one bit of the body is another, and the service gives no checksum"


class FaultyProxy:
    """Forwards requests to `target`, with the requested faults."""

    def __init__(self, target: str, rates: Mapping[Fault, float] | None = None, seed: int = 0) -> None:
        self._target = urlsplit(target).netloc
        self._rates = dict(rates or {})
        self._draw = random.Random(seed)
        self._lock = threading.Lock()
        self._next: dict[str, list[Fault]] = {}
        self._seen: Counter[str] = Counter()
        self.faults: Counter[Fault] = Counter()  # fault -> how often it has happened
        self._answers: dict[str, tuple[int, bytes]] = {}
        self._speaks = threading.Event()
        self._speaks.set()
        self._closed = threading.Event()
        self._refuses = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def lose_answers(self, method: str, count: int) -> None:
        """Serve the next `count` requests of `method`, but close their connections instead of answering."""
        self.do(method, Fault.LOST, count)

    def do(self, method: str, fault: Fault, count: int = 1) -> None:
        """Inject `fault` into the next `count` requests of `method`."""
        self._next[method] = [fault] * count

    def answer(self, method: str, status: int, code: str) -> None:
        """Answer every request of `method` with an S3 error."""
        self._answers[method] = (status, error_body(code))

    def fall_silent(self) -> None:
        """Accept requests without answering until `come_back`, which then serves them."""
        self._speaks.clear()

    def refuse(self) -> None:
        """Close every connection without an answer until `come_back`."""
        self._refuses = True
        self._speaks.set()

    def come_back(self) -> None:
        """Serve again."""
        self._refuses = False
        self._speaks.set()

    def seen(self, method: str) -> int:
        """Return the number of received requests of `method`."""
        return self._seen[method]

    def __enter__(self) -> FaultyProxy:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._speaks.set()
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, request: BaseHTTPRequestHandler) -> None:
        method = request.command
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        fault = self._fault(method)
        self._speaks.wait()
        if self._refuses:
            request.close_connection = True
            return
        if method in self._answers:
            self._reply(request, *self._answers[method], [])
            return
        match fault:
            case Fault.THROTTLE:
                self._reply(request, 503, error_body("SlowDown"), [])
            case Fault.ERROR:
                self._reply(request, 500, error_body("InternalError"), [])
            case Fault.RESET:
                request.close_connection = True
            case Fault.LOST:
                self._forward(request, body)
                request.close_connection = True
            case _:
                self._reply(request, *self._forward(request, body), fault)

    def _fault(self, method: str) -> Fault | None:
        """Choose the fault of this request."""
        with self._lock:
            self._seen[method] += 1
            asked, draw = self._next.get(method), self._draw.random()
            fault = asked.pop() if asked else None
            for kind, rate in self._rates.items():
                if fault is None and 0 <= draw < rate:
                    fault = kind
                draw -= rate
            if fault:
                self.faults[fault] += 1
            return fault

    def _forward(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes, list[tuple[str, str]]]:
        connection = http.client.HTTPConnection(self._target, timeout=HANG_SECONDS)
        connection.request(request.command, request.path, body, dict(request.headers))
        response = connection.getresponse()
        answer = response.read()
        connection.close()
        return response.status, answer, response.getheaders()

    def _reply(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: list[tuple[str, str]],
        fault: Fault | None = None,
    ) -> None:
        request.send_response_only(status)
        kept = {name: value for name, value in headers if name.lower() not in ("connection", "transfer-encoding")}
        if request.command != "HEAD":
            kept["Content-Length"] = str(len(body))
        if fault is Fault.ALTERED:
            kept = {name: value for name, value in kept.items() if not name.startswith("x-amz-checksum")}
        for name, value in kept.items():
            request.send_header(name, value)
        request.end_headers()
        middle = len(body) // 2
        match fault:
            case Fault.TRUNCATED:
                request.wfile.write(body[:middle])
                request.close_connection = True
            case Fault.STALLED:
                request.wfile.write(body[:middle])
                self._closed.wait(HANG_SECONDS)
                request.close_connection = True
            case Fault.SLOW:
                for part in (body[:middle], body[middle:]):
                    time.sleep(SLOW_SECONDS / 2)
                    request.wfile.write(part)
            case Fault.FLIPPED | Fault.ALTERED if body and status < 300:
                request.wfile.write(body[:-1] + bytes([body[-1] ^ 1]))
            case _:
                request.wfile.write(body)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                proxy._serve(self)

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


def error_body(code: str) -> bytes:
    """Build the body of an S3 error."""
    return f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
