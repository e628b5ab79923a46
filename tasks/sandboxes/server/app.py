"""The HTTP application: checks the token, limits the load, and serves the protocols of SandboxFusion and ROCK.

* A request without the server's token gets status 401, except `GET /v1/ping`.
* A server without a token rejects requests from web pages, because otherwise any web site could run programs.
* At most `at_once` requests to `/run_code` run, and at most `queue` requests wait; other requests get status 503.
* A request may wait for at most `queue_seconds`, and its body must arrive within `body_seconds`.
* If a caller of `/run_code` disconnects, its program is killed.
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

BODY_FACTOR = 2  # largest size of a request's body, as a multiple of the size of a sandbox's folder


@dataclass(frozen=True)
class ServerBounds:
    """The largest load that a server accepts."""

    at_once: int = 8
    live: int = 64  # largest number of sandboxes started by ROCK's protocol, which live until they are stopped
    queue: int = 256
    queue_seconds: float = 120.0
    memory_bytes: int = 256 * 2**20
    body_bytes: int = BODY_FACTOR * 64 * 2**20
    body_seconds: float = 60.0


class Gate:
    """Limits the number of requests that run at the same time, and the number of requests that wait."""

    def __init__(self, bounds: ServerBounds) -> None:
        self._bounds = bounds
        self._running = asyncio.Semaphore(bounds.at_once)
        self._count = 0

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        """Wait until the request may run.

        Raises:
            Full: too many requests are running and waiting, or the request has waited too long.
        """
        if self._count >= self._bounds.at_once + self._bounds.queue:
            raise Full(
                f"the server is busy: {self._bounds.at_once} requests run and {self._bounds.queue} wait; send "
                "this one later"
            )
        self._count += 1
        try:
            try:
                async with asyncio.timeout(self._bounds.queue_seconds):
                    await self._running.acquire()
            except TimeoutError:
                raise Full(
                    f"the server is busy: the request waited for {self._bounds.queue_seconds:g} s; send it later"
                ) from None
            try:
                yield
            finally:
                self._running.release()
        finally:
            self._count -= 1


class Full(Exception):
    """Raised if too many requests are running and waiting, or if a request has waited too long."""


def build_app(sandboxes: Sandboxes, token: str | None, bounds: ServerBounds) -> FastAPI:
    """Build the HTTP application on started sandboxes; if `token` is None, any caller may run programs."""
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
    """Run a request's program; if the caller disconnects, kill the program and return None."""
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
    """Wait until the caller of a request disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
