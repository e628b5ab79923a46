"""Runs an OpenAI-compatible server for tests of the judge. A function decides how the server behaves at each call."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = Mapping[str, Any]


@dataclass(frozen=True)
class Reply:
    """The server's reaction to a call: it answers with a status, headers and a body, resets the connection, or
    hangs.
    """

    text: str = ""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    does: str = "answers"  # or "resets", "hangs"


def chat(content: str, tokens: int = 100, finish: str = "stop") -> Reply:
    """Answer with a message of the judge."""
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish}
    usage = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
    return Reply(json.dumps({"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage}))


def verdict(**fields: Any) -> Reply:
    """Answer with a verdict that follows a reason."""
    return chat(json.dumps({"reason": "because", **fields}))


Behaviour = Callable[[int, Body], Reply]


@dataclass
class JudgeServer:
    """A running server: its address, and the bodies and headers (with names in lower case) of all calls so far."""

    behave: Behaviour
    url: str = ""
    bodies: list[Body] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    most: int = 0  # largest number of calls at a time
    ended: threading.Event = field(default_factory=threading.Event)
    _running: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, body: Body, headers: Mapping[str, str]) -> Reply:
        """Note a call, and return the server's reply."""
        with self._lock:
            self._running += 1
            self.most = max(self.most, self._running)
            self.bodies.append(body)
            self.headers.append(headers)
            number = len(self.bodies)
        try:
            return self.behave(number, body)
        finally:
            with self._lock:
                self._running -= 1


@contextmanager
def judge_server(behave: Behaviour) -> Iterator[JudgeServer]:
    """Run a server in threads of this process; `behave` gets the number of a call, from 1, and the call's body."""
    judge = JudgeServer(behave)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = judge.answer(body, {name.lower(): value for name, value in self.headers.items()})
            if reply.does == "hangs":
                judge.ended.wait()
            if reply.does != "answers":
                self.close_connection = True
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                return
            data = reply.text.encode()
            self.send_response(reply.status)
            for name, value in {**reply.headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Write no log."""

        def finish(self) -> None:
            with suppress(OSError):
                super().finish()

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128  # with the default of 5, some of many connections at a time are reset

    server = Server(("127.0.0.1", 0), Handler)
    judge.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield judge
    finally:
        judge.ended.set()
        server.shutdown()
        server.server_close()
