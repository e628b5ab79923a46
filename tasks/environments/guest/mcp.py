"""Serves an episode with an MCP server: a command that speaks JSON-RPC 2.0 over its standard input and output.

    rollflow --socket--> this process --stdin--> server
                             ^------------stdout, stderr

The client uses the requests `initialize`, `tools/list` and `tools/call` of the Model Context Protocol, in versions up
to 2025-11-25. Of the server's own requests, `ping` gets an answer, and any other gets the error "method not found".
Notifications of the server have no effect.

If the server fails, the reason quotes the end of its standard error. Deadlines are enforced by rollflow, not by this
process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

from rollflow.tasks.environments.guest.wire import LONGEST_LINE, LONGEST_TEXT, MARK, EnvironmentFault, Fields

PROTOCOL = "2025-11-25"
CHUNK = 1 << 16
MOST_PAGES = 100  # largest number of `tools/list` requests to one server
END_SECONDS = 2.0  # longest wait for the end of a server that has closed its output
METHOD_NOT_FOUND = -32601
SHOWN = 120  # number of bytes of a server's output that an error message quotes
# environment variables that a server inherits; other variables may contain secrets of the run
INHERITED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER", MARK)


class ServerEnded(Exception):
    """Raised if a server has ended or has written an invalid message.

    `status` is the wait status of an ended server. `said` is the end of the server's standard error.
    """

    def __init__(self, reason: str, status: int | None, said: str) -> None:
        super().__init__(reason)
        self.status, self.said = status, said


class RequestRefused(Exception):
    """Raised if a server has answered a request with an error."""


class McpConnection:
    """A running MCP server, with the connection to it."""

    def __init__(self, spec: Fields) -> None:
        """Start the server.

        Raises:
            EnvironmentFault: the command cannot be started.
        """
        names = (*INHERITED, *spec["pass_env"])
        variables = {name: os.environ[name] for name in names if name in os.environ}
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                spec["command"],
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                cwd=spec["cwd"] or None,
                env={**variables, **spec["env"]},
            )
        except (OSError, ValueError) as error:
            raise EnvironmentFault(
                f"the command {spec['command'][0]!r} of the MCP server cannot be started ({error})"
            ) from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._errors: int | None = self._process.stderr.fileno()
        for fd in (self._input, self._output, self._errors):
            os.set_blocking(fd, False)
        self._unsent, self._unread = bytearray(), bytearray()
        self._said = b""  # last bytes that the server wrote to its standard error
        self._number = 0

    def ask(self, method: str, params: Fields) -> Fields:
        """Send a request and return its result.

        Raises:
            RequestRefused: the server has answered with an error.
            ServerEnded: the server has ended, or has written an invalid message.
        """
        self._number += 1
        self._send({"id": self._number, "method": method, "params": params})
        while True:
            message = self._receive()
            if "method" in message:
                self._answer(message)
            # An answer without id means that the server could not read the request.
            elif message.get("id") in (self._number, None):
                return self._read_result(message)

    def notify(self, method: str) -> None:
        """Send a notification, which has no answer."""
        self._send({"method": method})

    def close(self) -> None:
        """Close the input of the server, so that the server ends itself, and wait for its end."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        while self._pump([]):
            self._unread.clear()
        self._process.wait()

    def _read_result(self, message: Mapping[str, Any]) -> Fields:
        error = message.get("error")
        if isinstance(error, dict):
            raise RequestRefused(str(error.get("message") or "the server refused the request")[:LONGEST_TEXT])
        result = message.get("result")
        if not isinstance(result, dict):
            raise self._fail("has answered a request without a result")
        return result

    def _answer(self, request: Mapping[str, Any]) -> None:
        """Answer a request of the server; do nothing if the message is a notification."""
        if "id" not in request:
            return
        if request["method"] == "ping":
            self._send({"id": request["id"], "result": {}})
        else:
            error = {"code": METHOD_NOT_FOUND, "message": "this client offers no such method"}
            self._send({"id": request["id"], "error": error})

    def _send(self, message: Fields) -> None:
        """Queue a message, and write what the server accepts now; `_receive` writes the rest while it waits for a
        message.
        """
        self._unsent += json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"
        self._write()

    def _receive(self) -> Fields:
        """Return the next message of the server."""
        while True:
            end = self._unread.find(b"\n")
            if end >= 0:
                line = bytes(self._unread[:end])
                del self._unread[: end + 1]
                if line.strip():
                    return self._decode(line)
                continue
            if len(self._unread) > LONGEST_LINE:
                raise self._fail(f"has written a line of more than {LONGEST_LINE} bytes")
            if not self._pump([self._input] if self._unsent else []):
                raise self._find_end()

    def _decode(self, line: bytes) -> Fields:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
            shown = line[:SHOWN].decode(errors="replace")
            raise self._fail(f"has written a line that is not a JSON-RPC message: {shown!r}")
        return message

    def _pump(self, writes: list[int]) -> bool:
        """Exchange bytes with the server once it can read or has written something; return False if it has closed its
        output."""
        errors = [] if self._errors is None else [self._errors]
        ready, writable, _ = select.select([self._output, *errors], writes, [])
        if writable:
            self._write()
        if self._errors in ready:
            part = self._read(self._errors)
            self._said = (self._said + part)[-SHOWN:]
            if not part:
                self._errors = None
        if self._output in ready:
            part = self._read(self._output)
            self._unread += part
            return bool(part)
        return True

    def _write(self) -> None:
        """Write as many queued bytes as the server accepts. A closed input is ignored, because the end of the server's
        output will show that the server has ended."""
        try:
            del self._unsent[: os.write(self._input, self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()

    def _read(self, fd: int | None) -> bytes:
        assert fd is not None
        try:
            return os.read(fd, CHUNK)
        except OSError:
            return b""

    def _find_end(self) -> ServerEnded:
        """Return an error that says how the server has ended."""
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return self._fail("has closed its output")
        return self._fail("has ended", -code if code < 0 else code << 8)

    def _fail(self, what: str, status: int | None = None) -> ServerEnded:
        """Return the error for a server that cannot be used any more, with the end of the server's standard error."""
        if self._errors is not None:
            self._said = (self._said + self._read(self._errors))[-SHOWN:]
        said = " ".join(self._said.decode(errors="replace").split())
        return ServerEnded(f"the server {what}", status, said)


class McpGuest:
    """Serves an episode with the tools of an MCP server."""

    def __init__(self, spec: Fields, parts: Fields) -> None:
        self._prefix = spec["prefix"]
        self._server = McpConnection(spec)

    def describe(self) -> Fields:
        """Begin the session with the server, and return the schemas of its tools.

        Raises:
            EnvironmentFault: the server does not begin the session, or offers no usable tools.
        """
        try:
            client = {"name": "rollflow", "version": "1"}
            begin = {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": client}
            self._server.ask("initialize", begin)
            self._server.notify("notifications/initialized")
            tools = [convert_tool(tool, self._prefix) for tool in self._list_tools()]
        except RequestRefused as error:
            raise EnvironmentFault(f"the MCP server refused a request ({error})") from error
        except ServerEnded as ended:
            raise EnvironmentFault(f"{ended}, and said: {ended.said}") from ended
        return {"tools": tools, "has_reward": False}

    def do_call(self, name: str, arguments: Any) -> Fields:
        """Call a tool of the server; if the call fails, the policy reads the error as the result."""
        try:
            params = {"name": name[len(self._prefix) :], "arguments": arguments}
            result = self._server.ask("tools/call", params)
        except RequestRefused as error:
            return {"error": str(error)}
        except ServerEnded as ended:
            return {"lost": str(ended), "status": ended.status, "said": ended.said}
        return {"error" if result.get("isError") is True else "text": read_result(result)}

    def do_close(self) -> Fields:
        """End the session with the server."""
        self._server.close()
        return {}

    def _list_tools(self) -> list[Any]:
        """Return all tools of the server, which may list them in several answers."""
        tools: list[Any] = []
        params: Fields = {}
        for _ in range(MOST_PAGES):
            page = self._server.ask("tools/list", params)
            tools += page["tools"] if isinstance(page.get("tools"), list) else []
            cursor = page.get("nextCursor")
            if not cursor:
                return tools
            params = {"cursor": cursor}
        raise EnvironmentFault(f"the list of the MCP server's tools has more than {MOST_PAGES} pages")


def convert_tool(tool: Any, prefix: str) -> Fields:
    """Return the schema of a server's tool in the format that chat templates use.

    Raises:
        EnvironmentFault: the tool has no name or no schema.
    """
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise EnvironmentFault("the MCP server offers a tool without a name; each tool needs a name")
    parameters = tool.get("inputSchema")
    if not isinstance(parameters, dict):
        raise EnvironmentFault(f"the tool {tool['name']!r} of the MCP server has no inputSchema; each tool needs one")
    described = {"name": prefix + tool["name"], "description": str(tool.get("description") or "")}
    return {"type": "function", "function": {**described, "parameters": parameters}}


def read_result(result: Mapping[str, Any]) -> str:
    """Return the text of a tool's result. Content that is not text is replaced by its type."""
    content = result.get("content")
    texts = [read_part(part) for part in content] if isinstance(content, list) else []
    if not texts and "structuredContent" in result:
        texts = [json.dumps(result["structuredContent"])]
    return "\n".join(texts)[:LONGEST_TEXT]


def read_part(part: Any) -> str:
    """Return the text of one part of a result."""
    if not isinstance(part, dict):
        return str(part)
    readers: dict[Any, Callable[[], Any]] = {
        "text": lambda: part.get("text", ""),
        "resource_link": lambda: part.get("uri", ""),
        "resource": lambda: part["resource"]["text"],
    }
    try:
        return str(readers[part.get("type")]())
    except (KeyError, TypeError):
        return f"[{part.get('type')}]"
