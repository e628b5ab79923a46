"""Tests rollflow's server and client of `/run_code`: requests of SandboxFusion's clients, tokens, load and retries."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from rollflow.flows.commands.cli import main
from rollflow.storage.errors import ConfigError
from rollflow.tasks.sandboxes import build_sandboxes, run_code
from rollflow.tasks.sandboxes.base import ExecResult, Program, ProgramEnd, Sandboxes, SandboxFailed
from rollflow.tasks.sandboxes.config import BubblewrapSandbox, RunCodeSandbox
from rollflow.tasks.sandboxes.run_code import RunCodeSandboxes, read_answer
from rollflow.tasks.sandboxes.server.app import ServerBounds
from rollflow.tasks.sandboxes.server.serve import read_token
from tests.support.sandbox_server import serve_in_background

VERL = {"compile_timeout": 10, "run_timeout": 10, "memory_limit_MB": 1024, "files": {}, "fetch_files": []}
LONG = 60.0
DOUBLE = "#include <iostream>\nint main() { int a; std::cin >> a; std::cout << 2 * a; }"


on_shared_loop = pytest.mark.asyncio(loop_scope="module")  # the event loop of `sandboxes`


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandboxes() -> AsyncIterator[Sandboxes]:
    """Start sandboxes for the servers of all tests; each test has its own server."""
    created = build_sandboxes(BubblewrapSandbox(processes=16, spares=1))
    try:
        await created.start()
    except ConfigError as error:
        pytest.skip(str(error))
    yield created
    await created.close()


@pytest_asyncio.fixture(loop_scope="module")
async def post(sandboxes: Sandboxes) -> AsyncIterator[Callable[..., Any]]:
    """Return a function that posts a request to a server and returns the answer's body."""
    async with serve_in_background(sandboxes) as url, httpx.AsyncClient(base_url=url, timeout=LONG) as client:

        async def send(**body: Any) -> Any:
            answer = await client.post("/run_code", json={"language": "python", **body})
            assert answer.status_code == 200, answer.text
            return answer.json()

        yield send


@on_shared_loop
async def test_request_in_the_form_of_verl_is_answered(post: Callable[..., Any]) -> None:
    found = await post(**VERL, code="print(int(input()) * 2)", stdin="21")
    assert found.keys() == {
        *("status", "message", "compile_result", "run_result", "executor_pod_name", "files"),
    }
    assert (found["status"], found["message"], found["compile_result"]) == ("Success", "", None)
    run = found["run_result"]
    assert isinstance(run.pop("execution_time"), float)
    assert run == {"status": "Finished", "return_code": 0, "stdout": "42\n", "stderr": ""}


@on_shared_loop
async def test_request_in_the_form_of_roll_is_answered(post: Callable[..., Any]) -> None:
    found = await post(code="print('a')", stdin="", expected_stdout="b", compile_timeout=5, run_timeout=5)
    assert (found["status"], found["run_result"]["stdout"]) == ("Success", "a\n")


@on_shared_loop
@pytest.mark.parametrize(
    ("body", "status", "run_status"),
    [
        ({"code": "raise SystemExit(3)"}, "Failed", "Finished"),
        ({"code": "while True: pass", "run_timeout": 1}, "Failed", "TimeLimitExceeded"),
        ({"code": "x = bytearray(300 << 20)", "memory_limit_MB": 100}, "Failed", "Finished"),
        ({"code": "print(open('a/b').read())", "files": {"a/b": "eA==", "c": None}}, "Success", "Finished"),
        ({"code": "read word; echo $word", "language": "bash", "stdin": "hi"}, "Success", "Finished"),
        ({"code": "main = do", "language": "haskell"}, "SandboxError", None),
        ({"code": "1", "files": {"a": "%%"}}, "SandboxError", None),
        ({"code": "1", "files": {"/etc/a": "eA=="}}, "SandboxError", None),
    ],
)
async def test_run_code_status_equals_that_of_sandbox_fusion(
    post: Callable[..., Any], body: dict[str, Any], status: str, run_status: str | None
) -> None:
    found = await post(**body)
    assert (found["status"], (found["run_result"] or {}).get("status")) == (status, run_status)
    assert bool(found["message"]) == (status == "SandboxError")


@on_shared_loop
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
async def test_cpp_program_is_compiled_and_run(post: Callable[..., Any]) -> None:
    found = await post(code=DOUBLE, language="cpp", stdin="21", compile_timeout=LONG)
    assert (found["status"], found["run_result"]["stdout"]) == ("Success", "42")
    broken = await post(code="int main() {", language="cpp", compile_timeout=LONG)
    assert (broken["status"], broken["run_result"]) == ("Failed", None)
    assert broken["compile_result"]["return_code"] == 1
    assert "error" in broken["compile_result"]["stderr"]


@on_shared_loop
async def test_fetched_files_are_returned_as_base64(post: Callable[..., Any]) -> None:
    found = await post(code="open('out', 'wb').write(bytes(range(256)))", fetch_files=["out", "none"])
    assert {path: base64.b64decode(data) for path, data in found["files"].items()} == {"out": bytes(range(256))}


@on_shared_loop
async def test_run_code_request_without_token_is_refused(sandboxes: Sandboxes) -> None:
    body = {"code": "print(1)", "language": "python"}
    async with serve_in_background(sandboxes, token="secret") as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/v1/ping")).json() == "pong"
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "Basic %%"}):
            assert (await client.post("/run_code", json=body, headers=headers)).status_code == 401
        answer = await client.post("/run_code", json=body, headers={"Authorization": "Bearer secret"})
        assert answer.json()["run_result"]["stdout"] == "1\n"
        assert (await client.post("/run_code", json=body, auth=("any", "secret"))).status_code == 200


@on_shared_loop
async def test_request_from_a_web_page_runs_no_program(sandboxes: Sandboxes) -> None:
    async with serve_in_background(sandboxes) as url, httpx.AsyncClient() as client:
        body = json.dumps({"code": "print(1)", "language": "python"})
        answer = await client.post(f"{url}/run_code", content=body, headers={"Origin": "https://example.org"})
        assert answer.status_code == 403


@on_shared_loop
async def test_sandbox_server_with_a_full_queue_answers_503(sandboxes: Sandboxes) -> None:
    bounds = ServerBounds(at_once=1, queue=1)
    body = {"code": "import time; time.sleep(2)", "language": "python"}
    async with serve_in_background(sandboxes, bounds=bounds) as url, httpx.AsyncClient(timeout=LONG) as client:
        answers = await asyncio.gather(*(client.post(f"{url}/run_code", json=body) for _ in range(4)))
    assert sorted(answer.status_code for answer in answers) == [200, 200, 503, 503]
    assert "1 requests run and 1 wait" in next(one for one in answers if one.status_code == 503).json()["detail"]


@on_shared_loop
async def test_program_is_killed_if_its_caller_disconnects(sandboxes: Sandboxes) -> None:
    body = {"code": "import time; time.sleep(600)", "language": "python", "run_timeout": 600}
    async with serve_in_background(sandboxes, bounds=ServerBounds(at_once=1)) as url, httpx.AsyncClient() as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(f"{url}/run_code", json=body, timeout=1.0)
        body["code"] = "print(1)"
        assert (await client.post(f"{url}/run_code", json=body, timeout=LONG)).json()["status"] == "Success"


@on_shared_loop
async def test_malformed_run_code_requests_are_refused(sandboxes: Sandboxes) -> None:
    bounds = ServerBounds(body_bytes=1000)
    async with serve_in_background(sandboxes, bounds=bounds) as url, httpx.AsyncClient(timeout=LONG) as client:
        for body, status in ((b"", 422), (b"[]", 422), (b'{"code": "1"}', 422), (b"x" * 2000, 413)):
            assert (await client.post(f"{url}/run_code", content=body)).status_code == status
        endless = json.dumps({"code": "1", "language": "python", "run_timeout": 1e9})
        assert (await client.post(f"{url}/run_code", content=endless)).status_code == 422


@on_shared_loop
async def test_slow_or_broken_request_does_not_occupy_the_server(
    sandboxes: Sandboxes, caplog: pytest.LogCaptureFixture
) -> None:
    """A caller that never sends the body of its request does not block other callers."""

    async def send(url: str, *, and_wait: bool) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
        writer.write(b"POST /run_code HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        await writer.drain()
        answer = await reader.readline() if and_wait else b""
        writer.close()
        return answer

    bounds = ServerBounds(at_once=1, body_seconds=0.5)
    async with serve_in_background(sandboxes, bounds=bounds) as url, httpx.AsyncClient() as client:
        await send(url, and_wait=False)
        assert b" 408 " in await send(url, and_wait=True)
        body = {"code": "print(1)", "language": "python"}
        assert (await client.post(f"{url}/run_code", json=body, timeout=LONG)).json()["status"] == "Success"
    assert "Exception in ASGI application" not in caplog.text


@on_shared_loop
async def test_request_with_endless_headers_is_refused(sandboxes: Sandboxes) -> None:
    async with serve_in_background(sandboxes, token="secret") as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
        writer.write(b"POST /run_code HTTP/1.1\r\nHost: x\r\nX: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                writer.write(b"x" * 2**14)
                await writer.drain()
        async with asyncio.timeout(LONG):
            assert b" 400 " in await reader.readline()
        writer.close()


@on_shared_loop
async def test_null_byte_in_a_path_is_refused(post: Callable[..., Any]) -> None:
    content = base64.b64encode(b"1").decode()
    found = await post(code="import os; print(os.listdir())", files={"a\0b": content})
    assert (found["status"], found["message"]) == (
        "SandboxError",
        "files: 'a\\x00b' cannot be written: Invalid argument",
    )
    found = await post(code="open('a', 'w').write('1')", fetch_files=["a\0b", "../a", "/etc/passwd", "a"])
    assert found["files"] == {"a": content}


def test_sandbox_token_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "token"
    token = read_token(file)
    assert len(token) >= 32
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_token(file) == token
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_token(file)


def test_server_without_token_listens_only_on_loopback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--sandboxes", "--no-token", "--host", "0.0.0.0"]) == 2
    assert "other machines could run programs" in capsys.readouterr().err
    assert main(["serve", "--no-token"]) == 2
    assert "add --sandboxes" in capsys.readouterr().err


class Answers:
    """A fake server that gives the prepared answers one after another."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.seen: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        status = self.statuses.pop(0)
        if status == 0:
            raise httpx.ConnectError("refused")
        run = {"status": "Finished", "return_code": 0, "stdout": "1", "stderr": "", "execution_time": 0.1}
        return httpx.Response(status, json={"status": "Success", "run_result": run})


def build_client(answers: Answers, **keys: Any) -> RunCodeSandboxes:
    """Create a client whose requests get the prepared answers."""
    created = RunCodeSandboxes(RunCodeSandbox(url="http://server/run_code", tries=3, **keys))
    created._client = httpx.AsyncClient(transport=httpx.MockTransport(answers))
    return created


@pytest.mark.parametrize(
    ("statuses", "requests", "succeeds"),
    [((0, 503, 200), 3, True), ((500, 502, 504), 3, False), ((401, 200), 1, False), ((422, 200), 1, False)],
)
async def test_run_code_client_retries_only_lost_requests(
    statuses: tuple[int, ...], requests: int, succeeds: bool
) -> None:
    answers = Answers(*statuses)
    client = build_client(answers)
    if succeeds:
        assert (await client.run(Program(code="1"))).stdout == b"1"
    else:
        with pytest.raises(SandboxFailed, match=str(statuses[requests - 1])):
            await client.run(Program(code="1"))
    assert len(answers.seen) == requests


@pytest.mark.parametrize(
    ("status", "content", "headers"),
    [
        (200, b"[" * 100_000, {}),
        (200, b"not gzip", {"Content-Encoding": "gzip"}),
        (302, b"", {"Location": "file:///etc/passwd"}),
        (200, b'{"status": "Success", "run_result": {"status": "Finished", "return_code": true}}', {}),
        (200, b'{"status": "Success", "run_result": {"status": "Finished", "return_code": "0"}}', {}),
        (200, b'{"status": ["Success"], "run_result": 1}', {}),
    ],
    ids=["deep", "gzip", "redirect", "truth", "text", "types"],
)
async def test_invalid_server_response_leaves_a_program_unjudged(
    status: int, content: bytes, headers: dict[str, str]
) -> None:
    client = build_client(Answers())
    answer = httpx.MockTransport(lambda _: httpx.Response(status, headers=headers, stream=httpx.ByteStream(content)))
    client._client = httpx.AsyncClient(transport=answer)
    client._config = client._config.model_copy(update={"tries": 1})
    with pytest.raises(SandboxFailed):
        await client.run(Program(code="1"))


async def test_program_that_prints_too_much_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a server does not limit the output of a program, the client limits it. The program then gets a score, and is
    not tried again.
    """
    monkeypatch.setattr(run_code, "LARGEST_ANSWER", 1000)
    run = {"status": "Finished", "return_code": 0, "stdout": "x" * 2000, "stderr": "", "execution_time": "soon"}
    client = build_client(Answers())
    answer = httpx.MockTransport(lambda _: httpx.Response(200, json={"status": "Success", "run_result": run}))
    client._client = httpx.AsyncClient(transport=answer)
    assert (await client.run(Program(code="1"))).end is ProgramEnd.OUTPUT
    monkeypatch.setattr(run_code, "LARGEST_ANSWER", 3000)
    assert (await client.run(Program(code="1"))).succeeded


def test_server_response_without_a_program_result_is_unjudged() -> None:
    run = {"status": "TimeLimitExceeded", "return_code": None, "stdout": None, "stderr": None, "execution_time": None}
    found = read_answer({"status": "Failed", "run_result": run})
    assert found == ExecResult(ProgramEnd.TIMEOUT, -9, b"", b"", 0.0)
    for answer in (
        {"status": "SandboxError", "message": "no pod", "run_result": None},
        {"status": "Failed", "run_result": None},
        {"status": "Success", "run_result": {"status": "Error", "return_code": None}},
        {},
    ):
        with pytest.raises(SandboxFailed):
            read_answer(answer)


async def test_run_code_client_refuses_a_missing_token_or_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SANDBOX_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=r"SANDBOX_TOKEN.*not set"):
        await RunCodeSandboxes(RunCodeSandbox(url="http://127.0.0.1:9/run_code", token_env="SANDBOX_TOKEN")).start()
    with pytest.raises(ConfigError, match=r"cannot run programs.*2 tries failed"):
        await RunCodeSandboxes(RunCodeSandbox(url="http://127.0.0.1:9/run_code", tries=2)).start()


@on_shared_loop
async def test_run_code_client_sends_the_token(sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_TOKEN", "secret")
    async with serve_in_background(sandboxes, token="secret") as url:
        client = RunCodeSandboxes(RunCodeSandbox(url=f"{url}/run_code", token_env="SANDBOX_TOKEN"))
        await client.start()
        await client.close()
        with pytest.raises(ConfigError, match="401"):
            await RunCodeSandboxes(RunCodeSandbox(url=f"{url}/run_code")).start()
