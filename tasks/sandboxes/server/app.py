"""The HTTP application: checks the token, bounds the load, and answers the requests of SandboxFusion and of ROCK.

- A request without the token is answered with 401, before its body is read. `GET /v1/ping` needs no token.
- Without a token, a request of a web page is refused, because a page of any site could send programs here.
- At most `at_once` requests run and `queue` requests wait; a further one is answered with 503 and a sentence.
- Every request has a deadline: `queue_seconds` to wait, `body_seconds` to send its body, and then its own time-outs.
- If the caller hangs up, its program is killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from rollflow.tasks.sandboxes.base import Sandboxes
from rollflow.tasks.sandboxes.server.callers import TooLarge, TooSlow, read_body, refuse_caller
from rollflow.tasks.sandboxes.server.live import LiveSandboxes
from rollflow.tasks.sandboxes.server.rock import BodyLimits, add_rock_routes
from rollflow.tasks.sandboxes.server.run_code import RunCodeRequest, RunCodeResponse, run_code

BODY_FACTOR = 2  # a body may have this many times the bytes of a sandbox's folder


@dataclass(frozen=True)
class ServerBounds:
    """What a server accepts."""

    at_once: int = 8
    live: int = 64  # sandboxes of ROCK's protocol, which live until they are stopped
    queue: int = 256
    queue_seconds: float = 120.0
    memory_bytes: int = 256 * 2**20
    body_bytes: int = BODY_FACTOR * 64 * 2**20
    body_seconds: float = 60.0


class Gate:
    """Lets a bounded number of requests run, and a bounded number wait."""

    def __init__(self, bounds: ServerBounds) -> None:
        self._bounds = bounds
        self._running = asyncio.Semaphore(bounds.at_once)
        self._count = 0

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        """Wait for a place.

        Raises:
            Full: as many requests run and wait as the server allows, or the request has waited too long.
        """
        if self._count >= self._bounds.at_once + self._bounds.queue:
            raise Full(f"{self._bounds.at_once} requests run and {self._bounds.queue} wait; send this one later")
        self._count += 1
        try:
            try:
                async with asyncio.timeout(self._bounds.queue_seconds):
                    await self._running.acquire()
            except TimeoutError:
                raise Full(f"the request waited for {self._bounds.queue_seconds:g} s; send it later") from None
            try:
                yield
            finally:
                self._running.release()
        finally:
            self._count -= 1


class Full(Exception):
    """Raised if the server has too many requests, or if a request has waited too long for its turn."""


def build_app(sandboxes: Sandboxes, token: str | None, bounds: ServerBounds) -> FastAPI:
    """Build the application on sandboxes that are started; with `token` None, every caller may run programs."""
    app = FastAPI(title="rollflow sandboxes", openapi_url=None, docs_url=None, redoc_url=None)
    gate = Gate(bounds)
    live = LiveSandboxes(sandboxes, bounds.live)

    @app.get("/v1/ping")
    async def ping() -> str:
        return "pong"

    @app.post("/run_code")
    async def run(request: Request) -> Response:
        if refused := refuse_caller(request, token):
            return JSONResponse({"detail": refused.reason}, refused.status, refused.headers)
        try:
            async with gate.enter():
                content = await read_body(request, bounds.body_bytes, bounds.body_seconds)
                body = RunCodeRequest.model_validate_json(content)
                answer = await run_for_caller(request, sandboxes, body, bounds.memory_bytes)
        except Full as error:
            return JSONResponse({"detail": str(error)}, 503, {"Retry-After": "1"})
        except TooLarge as error:
            return JSONResponse({"detail": str(error)}, 413)
        except TooSlow as error:
            return JSONResponse({"detail": str(error)}, 408)
        except ClientDisconnect:
            return JSONResponse({"detail": "the caller is gone"}, 400)
        except ValidationError as error:
            return JSONResponse(
                {"detail": error.errors(include_url=False, include_context=False, include_input=False)}, 422
            )
        return JSONResponse(answer.model_dump() if answer else {"detail": "the caller is gone"})

    add_rock_routes(app, live, token, BodyLimits(bounds.body_bytes, bounds.body_seconds))
    app.state.live = live
    return app


async def run_for_caller(
    request: Request, sandboxes: Sandboxes, body: RunCodeRequest, memory_bytes: int
) -> RunCodeResponse | None:
    """Run a request; kill its program and return None if the caller hangs up."""
    running = asyncio.create_task(run_code(sandboxes, body, memory_bytes))
    gone = asyncio.create_task(wait_until_gone(request))
    try:
        await asyncio.wait((running, gone), return_when=asyncio.FIRST_COMPLETED)
        return await running if running.done() else None
    finally:
        for task in (running, gone):
            task.cancel()
        await asyncio.gather(running, gone, return_exceptions=True)


async def wait_until_gone(request: Request) -> None:
    """Wait until the caller hangs up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
