"""An MCP server that is written without an SDK. Its arguments name a fault: `bare_server.py [WRONG WHERE]`.

WHERE is the method at which the fault WRONG happens: initialize, tools/list or tools/call.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

WRONG, WHERE = [*sys.argv[1:], "", ""][:2]
PATH = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOLS = [
    {"name": name, "description": f"Does {name}.", "inputSchema": PATH} for name in ("echo", "count", "draw", "fail")
]
calls = 0


def send(**message: Any) -> None:
    """Write a message."""
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def do_wrong() -> None:
    """Do what the fault's name says."""
    if WRONG == "hang":
        time.sleep(600)
    elif WRONG == "stubborn":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        time.sleep(600)
    elif WRONG == "exit":
        print("the disk is full", file=sys.stderr, flush=True)
        os._exit(3)
    elif WRONG == "abort":
        os.abort()
    elif WRONG == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif WRONG == "garbage":
        print("Welcome!", flush=True)
    elif WRONG == "array":
        print("[1, 2]", flush=True)
    elif WRONG == "version 1":
        print('{"id": 1, "result": {}}', flush=True)
    elif WRONG == "endless":
        while True:
            sys.stdout.write("x" * 65536)
    elif WRONG == "closed":
        os.close(1)
        time.sleep(600)


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a request."""
    global calls
    if method == "initialize":
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": {}}
    if method == "tools/list":
        if WRONG == "pages":
            return {"tools": [], "nextCursor": "again"}
        if WRONG == "nameless":
            return {"tools": [{"inputSchema": {}}]}
        return {"tools": TOOLS[2:]} if params.get("cursor") else {"tools": TOOLS[:2], "nextCursor": "2"}
    calls += 1
    text = params["arguments"].get("text", "")
    kinds: dict[str, Any] = {
        "echo": [{"type": "text", "text": text}, {"type": "resource", "resource": {"text": "!"}}],
        "count": [{"type": "text", "text": f"call {calls}, {sorted(os.environ)}, {os.getcwd()}"}],
        "draw": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}],
        "fail": [{"type": "text", "text": "it failed"}],
    }
    return {"content": kinds[params["name"]], "isError": params["name"] == "fail"}


def main() -> None:
    """Answer requests until the input ends."""
    for line in sys.stdin:
        message = json.loads(line)
        if "method" not in message:
            continue
        if message["method"] == WHERE:
            print("x" * 200_000, file=sys.stderr)  # more than a pipe holds
            do_wrong()
        if "id" not in message:
            continue
        send(method="notifications/message", params={"level": "info", "data": "a request"})
        send(id="mine", method="ping")
        send(id=7, method="roots/list")
        if message["method"] == "tools/call" and message["params"]["name"] not in {tool["name"] for tool in TOOLS}:
            send(id=message["id"], error={"code": -32602, "message": "unknown tool"})
        elif WRONG == "no result" and message["method"] == WHERE:
            send(id=message["id"])
        elif WRONG == "refused" and message["method"] == WHERE:
            send(id=message["id"], error={"code": -32603, "message": "not today"})
        else:
            send(id=message["id"], result=answer(message["method"], message.get("params") or {}))
    if WRONG == "stays":
        time.sleep(600)


if __name__ == "__main__":
    main()
