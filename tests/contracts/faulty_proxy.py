"""An HTTP proxy on loopback that loses, replaces or withholds the answers of an object store.

A lost answer is the real thing: the server has done the work and the client's connection closes.
"""

from __future__ import annotations

import http.client
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import urlsplit


class FaultyProxy:
    """Forwards requests to `target`, with the faults that were asked for."""

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target).netloc
        self._lose: Counter[str] = Counter()
        self._seen: Counter[str] = Counter()
        self._answers: dict[str, tuple[int, bytes]] = {}
        self._speaks = threading.Event()
        self._speaks.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def lose_answers(self, method: str, count: int) -> None:
        """Serve the next `count` requests of `method`, but close the connection in place of an answer."""
        self._lose[method] = count

    def answer(self, method: str, status: int, code: str) -> None:
        """Answer every request of `method` with an S3 error."""
        self._answers[method] = (status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def fall_silent(self) -> None:
        """Accept requests and answer none, until the proxy is closed."""
        self._speaks.clear()

    def seen(self, method: str) -> int:
        """How many requests of `method` came in."""
        return self._seen[method]

    def __enter__(self) -> FaultyProxy:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._speaks.set()
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, request: BaseHTTPRequestHandler) -> None:
        method = request.command
        self._seen[method] += 1
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        self._speaks.wait()
        if method in self._answers:
            self._reply(request, *self._answers[method], [])
            return
        status, answer, headers = self._forward(request, body)
        if self._lose[method] > 0:
            self._lose[method] -= 1
            request.close_connection = True
            return
        self._reply(request, status, answer, headers)

    def _forward(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes, list[tuple[str, str]]]:
        connection = http.client.HTTPConnection(self._target, timeout=20)
        connection.request(request.command, request.path, body, dict(request.headers))
        response = connection.getresponse()
        answer = response.read()
        connection.close()
        return response.status, answer, response.getheaders()

    def _reply(self, request: BaseHTTPRequestHandler, status: int, body: bytes, headers: list[tuple[str, str]]) -> None:
        request.send_response_only(status)
        kept = {name: value for name, value in headers if name.lower() not in ("connection", "transfer-encoding")}
        if request.command != "HEAD":
            kept["Content-Length"] = str(len(body))
        for name, value in kept.items():
            request.send_header(name, value)
        request.end_headers()
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
