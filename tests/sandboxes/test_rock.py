"""Tests rollflow's server and client of ROCK's protocol: the JSON of answers, tokens, limits, hostile paths and
programs, and rocklets.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Outcome
from rollflow.tasks.sandboxes import build_sandboxes, workspace
from rollflow.tasks.sandboxes.base import Program, ProgramEnd, Sandboxes, SandboxFailed, SandboxLimits
from rollflow.tasks.sandboxes.config import MIB, BubblewrapSandbox, RockSandbox, UnsafeProcessSandbox
from rollflow.tasks.sandboxes.rock import RockSandboxes
from rollflow.tasks.sandboxes.server import live as live_sandboxes
from rollflow.tasks.sandboxes.server.app import ServerBounds
from rollflow.tasks.sandboxes.server.live import MOST_SESSIONS, LiveSandbox, LiveSandboxes, Refused
from rollflow.tasks.sandboxes.server.rock import PREFIX, RockService
from rollflow.tasks.sandboxes.server.rock_requests import StartRequest
from rollflow.tasks.scorers.code.scorer import CodeScorer
from rollflow.tasks.scorers.config import CodeReward
from tests.sandboxes.programs import PROGRAMS
from tests.sandboxes.programs.base import Hostile
from tests.support.counts import examples
from tests.support.sandbox_processes import list_boxes, list_sandbox_processes
from tests.support.sandbox_server import serve_in_background

LONG = 60.0
BOUNDS = ServerBounds(live=3, memory_bytes=128 * MIB)
SMALL = BubblewrapSandbox(
    memory_bytes=128 * MIB, folder_bytes=8 * MIB, folder_files=200, output_bytes=100_000, processes=20, spares=0
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Caller:
    """Sends requests of ROCK's protocol for one sandbox."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client, self.identity = client, ""

    async def send(self, path: str, /, **body: Any) -> Any:
        """Send a POST request for the sandbox, and return the JSON of the answer."""
        answer = await self.client.post(f"{PREFIX}/{path}", json={"sandbox_id": self.identity, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def get(self, path: str, /, **query: Any) -> Any:
        """Send a GET request for the sandbox, and return the JSON of the answer."""
        return (await self.client.get(f"{PREFIX}/{path}", params={"sandbox_id": self.identity, **query})).json()

    async def start(self, **body: Any) -> Any:
        """Start the sandbox, and return the JSON of the answer."""
        found = (await self.client.post(f"{PREFIX}/start_async", json={"image": "python:3.11", **body})).json()
        self.identity = (found["result"] or {}).get("sandbox_id", "")
        return found

    async def upload(self, path: str, data: bytes) -> Any:
        """Upload a file, and return the JSON of the answer."""
        form = {"target_path": path, "sandbox_id": self.identity}
        return (await self.client.post(f"{PREFIX}/upload", data=form, files={"file": ("name", data)})).json()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandboxes() -> AsyncIterator[Sandboxes]:
    """Start sandboxes for the servers of all tests; each test has its own server."""
    created = build_sandboxes(SMALL)
    try:
        await created.start()
    except ConfigError as error:
        pytest.skip(str(error))
    yield created
    await created.close()


@asynccontextmanager
async def serve(sandboxes: Sandboxes, **more: Any) -> AsyncIterator[Caller]:
    """Serve sandboxes to one caller."""
    async with (
        serve_in_background(sandboxes, bounds=BOUNDS, **more) as url,
        httpx.AsyncClient(base_url=url, timeout=LONG) as client,
    ):
        yield Caller(client)


@pytest_asyncio.fixture(loop_scope="module")
async def caller(sandboxes: Sandboxes) -> AsyncIterator[Caller]:
    """Serve sandboxes to a caller who has started one."""
    async with serve(sandboxes) as created:
        assert (await created.start())["status"] == "Success"
        yield created


def read_reason(envelope: Any, code: int = 4000) -> str:
    """Check that a request failed, and return the reason."""
    assert (envelope["status"], envelope["result"]["code"]) == ("Failed", code), envelope
    assert envelope["error"] == envelope["message"] == envelope["result"]["failure_reason"]
    return str(envelope["error"])


async def test_rock_server_starts_describes_and_stops_a_sandbox(sandboxes: Sandboxes) -> None:
    async with serve(sandboxes) as caller:
        started = await caller.start(memory="100m", cpus=1, disk="4m", unknown=1)
        assert started["result"].keys() >= {"sandbox_id", "host_name", "host_ip", "cpus", "memory", "disk"}
        found = (await caller.get("get_status"))["result"]
        assert (found["state"], found["is_alive"], found["image"], found["memory"]) == (
            *("running", True),
            *("python:3.11", "100m"),
        )
        assert "running" in read_reason(await caller.send("delete"))
        assert (await caller.send("stop"))["status"] == "Success"
        assert (await caller.get("is_alive"))["result"]["is_alive"] is False
        assert "was stopped" in read_reason(await caller.get("get_status"))
        assert (await caller.get("get_status", include_all_states=True))["result"]["state"] == "stopped"
        assert "files are deleted" in read_reason(await caller.send("restart"))
        assert (await caller.send("delete"))["status"] == "Success"
        assert "does not exist" in read_reason(await caller.get("get_status", include_all_states=True))


async def test_resource_limits_of_a_request_are_enforced(sandboxes: Sandboxes) -> None:
    async with serve(sandboxes) as caller:
        await caller.start(memory="64m", cpus=0.5, disk="2m")
        # a busy machine measures the memory late, so the program keeps the memory for a while
        code = "import time\nx = []\nwhile len(x) < 100: x.append(b'x' * (1 << 20))\ntime.sleep(20)\nprint('held')"
        found = (await caller.send("execute", command=["python3", "-c", code]))["result"]
        assert "held" not in found["stdout"]
        fill = "for n in 1 2 3; do head -c 1000000 /dev/zero > file$n; done"
        found = (await caller.send("execute", command=fill))["result"]
        assert "No space left" in found["stderr"]
        code = "import os\nprint(len(os.sched_getaffinity(0)))\nos.sched_setaffinity(0, range(os.cpu_count()))"
        found = (await caller.send("execute", command=["python3", "-c", code]))["result"]
        assert found["stdout"] == "1\n", found
    async with serve(sandboxes) as caller:
        for wrong in ({"memory": "1m"}, {"memory": "lots"}, {"num_gpus": 1}, {"image_os": "windows"}, {"cpus": 0}):
            read_reason(await caller.start(**wrong))
        read_reason(await caller.start(sandbox_id="../x"))


async def test_rock_command_returns_output_and_exit_code(caller: Caller) -> None:
    found = await caller.send("execute", command=["sh", "-c", "echo $A; echo e >&2; exit 4"], env={"A": "b"})
    assert found["result"] == {"stdout": "b\n", "stderr": "e\n", "exit_code": 4, "end": "exited"}
    assert (await caller.send("execute", command="echo $((6 * 7)) | cat"))["result"]["stdout"] == "42\n"
    found = (await caller.send("execute", command=["sleep", "600"], timeout=0.3))["result"]
    assert (found["exit_code"], found["end"]) == (-1, "timeout")
    assert "exceeded" in found["failure_reason"]
    assert (await caller.send("execute", command=["false"], check=True))["result"]["exit_code"] == -1
    found = (await caller.send("execute", command=["false"], check=True, error_msg="no build"))["result"]
    assert found["failure_reason"] == "no build: Command ['false'] failed with exit code 1"
    found = (await caller.send("execute", command=["false"], error_msg="no build"))["result"]
    assert (found["exit_code"], "failure_reason" in found) == (1, False)
    read_reason(await caller.send("execute", command=[]))
    read_reason(await caller.send("execute"))


async def test_session_answers_as_rock_does(caller: Caller) -> None:
    await caller.send("write_file", path="/tmp/env.sh", content="export FROM=file")
    await caller.send("create_session", session="s", startup_source=["/tmp/env.sh"], env={"A": "b"})
    assert "already exists" in read_reason(await caller.send("create_session", session="s"))
    found = await caller.send("run_in_session", session="s", command="cd /tmp; x=1; echo $A $FROM", timeout=None)
    assert (found["status"], found["result"]["output"], found["result"]["exit_code"]) == ("Success", "b file", 0)
    failed = await caller.send("run_in_session", session="s", command="echo $x; false")
    assert "exit code 1" in read_reason(failed, 6000)
    assert failed["result"]["output"] == "1"
    failed = await caller.send("run_in_session", session="s", command="echo 1; false", error_msg="no build")
    assert read_reason(failed, 6000).startswith("no build: Command 'echo 1; false' failed with exit code 1")
    found = await caller.send("run_in_session", session="s", command="false", check="silent")
    assert found["result"]["exit_code"] == 1
    assert (await caller.send("run_in_session", session="s", command="false", check="ignore"))["result"][
        "exit_code"
    ] is None
    late = await caller.send("run_in_session", session="s", command="sleep 600", timeout=0.3)
    assert read_reason(late, 6000).startswith("timeout after 0.3 seconds while running command 'sleep 600'")
    assert (await caller.send("run_in_session", session="s", command="echo $x"))["result"]["output"] == "1"
    assert (await caller.send("close_session", session="s"))["status"] == "Success"
    assert "does not exist" in read_reason(await caller.send("run_in_session", session="s", command="true"))
    read_reason(await caller.send("run_in_session", session="s", command="gdb", is_interactive_command=True))


async def test_rock_session_of_another_user_is_refused(caller: Caller) -> None:
    for user in ("admin", "root", "0"):
        reason = read_reason(await caller.send("create_session", session="t", remote_user=user))
        assert reason == f"remote_user = {user!r}: all programs of a sandbox of this server run as user 1000; " + (
            "leave out the key"
        )
    for user in ("1000", "", None):
        assert (await caller.send("create_session", session=f"as {user}", remote_user=user))["status"] == "Success"


@pytest.mark.skipif(os.geteuid() != 0, reason="only for root are programs of this kind root")
async def test_rock_session_of_the_programs_own_user_is_accepted() -> None:
    created = build_sandboxes(UnsafeProcessSandbox(spares=0))
    await created.start()
    try:
        async with serve(created) as caller:
            await caller.start()
            assert (await caller.send("create_session", session="s", remote_user="root"))["status"] == "Success"
            assert "user 0" in read_reason(await caller.send("create_session", session="t", remote_user="nobody"))
    finally:
        await created.close()


async def test_new_session_replaces_the_oldest_beyond_the_limit(caller: Caller) -> None:
    for number in range(MOST_SESSIONS + 2):
        assert (await caller.send("create_session", session=f"bash-{number}"))["status"] == "Success"
    read_reason(await caller.send("run_in_session", session="bash-0", command="true"))
    assert (await caller.send("run_in_session", session="bash-2", command="true"))["status"] == "Success"


async def test_rock_server_writes_and_reads_files(caller: Caller) -> None:
    assert (await caller.upload("/tmp/in/data", bytes(range(256))))["result"]["success"]
    found = await caller.send("execute", command="wc -c < in/data; md5sum < /tmp/in/data")
    assert found["result"]["stdout"].split()[:2] == ["256", "e2c865db4162bed963bfaa9ef6ac18f0"]
    await caller.send("write_file", path="text", content="h\u00e9\r\n")
    assert (await caller.send("read_file", path="text"))["result"] == {"content": "h\u00e9\r\n"}
    found = await caller.send("read_file", path="text", encoding="latin-1")
    assert found["result"]["content"] == "h\u00c3\u00a9\r\n"
    read_reason(await caller.send("read_file", path="in/data"))
    read_reason(await caller.send("read_file", path="text", encoding="base64"))
    read_reason(await caller.send("read_file", path="text", encoding="no-such"))
    read_reason(await caller.upload("", b"x"))
    answer = await caller.client.post(f"{PREFIX}/upload", content=b"no form")
    read_reason(answer.json())


ELSEWHERE = (
    "/etc/passwd",
    "../../etc/passwd",
    "link",
    "folder/passwd",
    "/proc/1/environ",
    "/proc/self/mem",
    "pipe",
    ".",
)


@pytest.mark.parametrize("kind", ["bubblewrap", "unsafe-process"])
async def test_rock_file_paths_stay_inside_the_sandbox(kind: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("SECRET")
    created = build_sandboxes(SMALL if kind == "bubblewrap" else UnsafeProcessSandbox(spares=0))
    try:
        await created.start()
    except ConfigError as error:
        pytest.skip(str(error))
    async with serve(created) as caller:
        await caller.start()
        links = f"ln -s {secret} link; ln -s {tmp_path} folder; mkfifo pipe"
        await caller.send("execute", command=links)
        for path in (*ELSEWHERE, str(secret), "folder/secret", f"../../../../../..{secret}"):
            read_reason(await caller.send("read_file", path=path))
        for path in ("link", "folder/new", "folder/secret", str(secret), str(tmp_path / "new"), "pipe", "a\0b"):
            await caller.send("write_file", path=path, content="CHANGED")
            await caller.upload(path, b"CHANGED")
    await created.close()
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert secret.read_text() == "SECRET"


async def test_request_without_token_is_refused_before_its_body(sandboxes: Sandboxes) -> None:
    async with serve(sandboxes, token="secret") as caller:
        for headers in ({}, {"X-Key": "other"}, {"X-API-Key": ""}, {"Authorization": "Bearer other"}):
            for path in ("start_async", "execute", "upload", "stop"):
                answer = await caller.client.post(f"{PREFIX}/{path}", content=b"no json", headers=headers)
                assert (answer.status_code, answer.json()["status"]) == (401, "Failed")
            answer = await caller.client.get(f"{PREFIX}/is_alive", params={"sandbox_id": "x"}, headers=headers)
            assert answer.status_code == 401
        for headers in ({"X-Key": "secret"}, {"X-API-Key": "secret"}, {"Authorization": "Bearer secret"}):
            answer = await caller.client.get(f"{PREFIX}/is_alive", params={"sandbox_id": "x"}, headers=headers)
            assert answer.json()["result"]["is_alive"] is False
    async with serve(sandboxes) as caller:
        answer = await caller.client.post(f"{PREFIX}/stop", json={}, headers={"Origin": "https://example.org"})
        assert answer.status_code == 403


async def test_number_of_sandboxes_is_limited_and_unused_ones_end(
    sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_sandboxes, "CHECK_SECONDS", 0.05)
    boxes = set(list_boxes())  # the box of `sandboxes`, and boxes that other tests of this process left
    own = max(boxes, key=lambda box: box.create_time())
    async with serve(sandboxes) as caller:
        before = len(list_sandbox_processes())
        for _ in range(BOUNDS.live):
            await caller.start(auto_clear_time=0)
        for _ in range(600):
            if len(list_sandbox_processes()) <= before:
                break
            await asyncio.sleep(0.05)
        assert len(list_sandbox_processes()) <= before
        for _ in range(BOUNDS.live):
            assert (await caller.start())["status"] == "Success"
        assert "the limit of this server" in read_reason(await caller.start(), 5000)
    now = set(list_boxes())
    assert own in now, "all sandboxes share the box, which lives on"
    assert not now - boxes
    for _ in range(600):
        if len(list_sandbox_processes()) <= before:
            break
        await asyncio.sleep(0.05)
    assert len(list_sandbox_processes()) <= before  # the sandboxes ended when the server ended


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [
        ({}, 1800.0),
        ({"auto_clear_time_minutes": 5}, 300.0),
        ({"auto_clear_time_minutes": 5, "auto_clear_time": 7}, 420.0),
        ({"auto_clear_time": 1e300}, 86_400.0),
        ({"auto_clear_time_minutes": 1e9}, 86_400.0),
    ],
)
async def test_unused_sandbox_is_stopped_after_a_day_at_most(asked: dict[str, float], seconds: float) -> None:
    """A request cannot set a longer time without requests than a day."""
    given = list[float]()

    class Live(LiveSandboxes):
        async def start(self, *place: Any) -> LiveSandbox:
            given.append(place[-1])
            raise Refused("enough")

    with pytest.raises(Refused):
        await RockService(Live(build_sandboxes(SMALL), 1)).start(StartRequest(image="python:3.11", **asked))
    assert given == [seconds]


async def test_id_of_a_starting_sandbox_cannot_be_used_again(sandboxes: Sandboxes) -> None:
    """Otherwise the first of two sandboxes with the same id could not be stopped, and would exceed every time limit."""
    live = LiveSandboxes(sandboxes, 3)
    starts = [live.start("same", SandboxLimits(), {}, LONG) for _ in range(2)]
    found = await asyncio.gather(*starts, return_exceptions=True)
    assert [type(one) for one in found] == [LiveSandbox, Refused]
    assert await live.stop("same")
    live.forget("same")
    assert (await live.start("same", SandboxLimits(), {}, LONG)).identity == "same"
    await live.close()


async def test_dead_sandbox_is_reported_and_replaced(caller: Caller) -> None:
    await caller.send("create_session", session="s")
    max(list_boxes(), key=lambda box: box.create_time()).kill()
    for _ in range(600):  # the server notices the death a moment later
        if (await caller.get("is_alive"))["result"]["is_alive"] is False:
            break
        await asyncio.sleep(0.05)
    assert (await caller.get("is_alive"))["result"]["is_alive"] is False
    assert "was stopped" in read_reason(await caller.send("execute", command="true"))
    for _ in range(100):
        if (await caller.start())["status"] == "Success":
            break
        await asyncio.sleep(0.1)
    assert (await caller.send("execute", command="echo new"))["result"]["stdout"] == "new\n"


# Programs that print `ESCAPED` for something that a served sandbox allows: they see the guest process and, in a
# session, /dev/null and the variables of the shell.
ALLOWED = ("other processes", "writing to stdin", "environment of the box")
HOSTILE = [hostile for hostile in PROGRAMS if hostile.name not in ALLOWED]


@pytest.mark.many
@pytest.mark.parametrize("hostile", HOSTILE[:: len(HOSTILE) // examples(len(HOSTILE))], ids=lambda one: one.name)
async def test_hostile_program_does_no_harm_to_a_served_sandbox(caller: Caller, hostile: Hostile) -> None:
    await caller.send("write_file", path="main.py", content=hostile.source)
    found = (await caller.send("execute", command=["python3", "main.py"], timeout=hostile.seconds + 0.5))["result"]
    assert "ESCAPED" not in found["stdout"] + found["stderr"], found
    assert len(found["stdout"]) <= SMALL.output_bytes
    await caller.send("create_session", session="s")
    found = await caller.send("run_in_session", session="s", command="python3 main.py", timeout=hostile.seconds + 0.5)
    assert "ESCAPED" not in json.dumps(found)
    if not (await caller.get("is_alive"))["result"]["is_alive"]:
        assert (await caller.start())["status"] == "Success"
    assert (await caller.send("execute", command="echo $((6 * 7))"))["result"]["stdout"] == "42\n"


FORGE = """
import os, socket
parents = [os.getppid()]
for pid in {int(p) for p in os.listdir("/proc") if p.isdigit()} - {os.getpid(), 1}:
    for fd in range(20):
        for open_it in (lambda p: open(p, "wb", 0), lambda p: open(p, "rb+", 0)):
            try:
                with open_it(f"/proc/{pid}/fd/{fd}") as file: file.write(b"FORGED" * 100)
            except OSError: pass
    try:
        with open(f"/proc/{pid}/mem", "rb+", 0) as file: print("ESCAPED", pid, open(f"/proc/{pid}/cmdline").read())
    except OSError: pass
for fd in range(3, 20):
    try:
        os.write(fd, b"FORGED" * 100)
        print("ESCAPED fd", fd)
    except OSError: pass
raise SystemExit(5)
"""


async def test_program_cannot_write_to_the_result_channel(caller: Caller) -> None:
    await caller.send("write_file", path="forge.py", content=FORGE)
    found = (await caller.send("execute", command=["python3", "forge.py"], timeout=LONG))["result"]
    assert (found["exit_code"], found["stderr"]) == (5, "")
    assert "ESCAPED" not in found["stdout"]
    assert (await caller.send("execute", command="echo sound"))["result"]["stdout"] == "sound\n"


SIGNAL_ALL = """
import os, time
for pid in {int(p) for p in os.listdir("/proc") if p.isdigit()} - {1, os.getpid()}:
    os.kill(pid, NUMBER)
print(42)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("print(int(input()) * 2)", Outcome.CORRECT),
        ("print(1)", Outcome.WRONG),
        ("while True: pass", Outcome.TIMEOUT),
        ("import os, time\nos.kill(os.getppid(), 9)\nprint(42); time.sleep(600)", Outcome.WRONG),
        (SIGNAL_ALL.replace("NUMBER", "9"), Outcome.WRONG),
        pytest.param(SIGNAL_ALL.replace("NUMBER", "19"), Outcome.TIMEOUT, marks=pytest.mark.soak),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", None),
    ],
    ids=["right", "wrong", "loop", "kills its parent", "kills all", "stops all", "memory"],
)
async def test_programs_are_scored_through_rock_server_and_client(
    sandboxes: Sandboxes, code: str, outcome: Outcome | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "STOP_SECONDS", 3.0)  # seconds to wait for a stopped guest
    async with serve_in_background(sandboxes, bounds=BOUNDS) as url:
        config = RockSandbox(url=url, memory_bytes=128 * MIB, at_once=2)
        scorer = CodeScorer(CodeReward(case_seconds=1.0, fenced=False, sandbox=config))
        score = await scorer.score(code, {"cases": [{"stdin": "21", "stdout": "42"}]})
        await scorer.close()
    assert score.outcome in ((outcome,) if outcome else (Outcome.WRONG, Outcome.KILLED)), score
    assert score.value == float(outcome is Outcome.CORRECT)


class Rock:
    """A fake server with one prepared answer, or a list of answers, for each path."""

    def __init__(self, **answers: Any) -> None:
        started = {"sandbox_id": "one"}
        self.answers: dict[str, Any] = {
            "start_async": started,
            "get_status": {"is_alive": True},
            "stop": {},
            "upload": {},
            **answers,
        }
        self.seen: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix(f"{PREFIX}/")
        self.seen.append(path)
        answer = self.answers[path]
        answer = answer.pop(0) if isinstance(answer, list) else answer
        if isinstance(answer, int):
            return httpx.Response(answer, text="broken")
        if isinstance(answer, Exception):
            raise answer
        envelope = answer if "status" in answer and "result" in answer else {"status": "Success", "result": answer}
        return httpx.Response(200, json=envelope)


def build_client(server: Callable[[httpx.Request], Any], **keys: Any) -> RockSandboxes:
    """Create a client that sends its requests to the function `server`."""
    created = RockSandboxes(RockSandbox(url="http://server", tries=2, **keys))
    created._client = httpx.AsyncClient(transport=httpx.MockTransport(server))
    return created


DONE = {"stdout": "1", "stderr": "", "exit_code": 0}
NOT_STARTED = {"is_alive": False, "status": {"pull": {"status": "failed"}}}
FAILED = {"status": "Failed", "error": "no worker", "result": None}


@pytest.mark.parametrize(
    ("answers", "succeeds"),
    [
        ({"execute": DONE}, True),
        ({"execute": [httpx.ConnectError("refused"), DONE]}, True),
        ({"execute": [502, DONE]}, True),
        ({"execute": [FAILED, DONE]}, True),
        ({"execute": [{**DONE, "exit_code": -1}, DONE]}, True),
        ({"execute": [{}, DONE]}, True),
        ({"start_async": [FAILED, {"sandbox_id": "two"}], "execute": DONE}, True),
        (
            {
                "get_status": [{"is_alive": False, "status": {"pull": {"status": "failed"}}}, {"is_alive": True}],
                "execute": DONE,
            },
            True,
        ),
        ({"execute": [502, 502]}, False),
        ({"start_async": [FAILED, FAILED]}, False),
        ({"start_async": [{"status": "Failed", "error": "full", "result": {"code": 5000}}] * 2}, False),
    ],
)
async def test_rock_client_retries_a_program_in_a_new_sandbox(answers: dict[str, Any], succeeds: bool) -> None:
    server = Rock(**answers)
    client = build_client(server)
    if succeeds:
        assert (await client.run(Program(code="1"))).stdout == b"1"
    else:
        with pytest.raises(SandboxFailed, match="2 tries failed"):
            await client.run(Program(code="1"))
    started = server.seen.count("execute") if "start_async" not in answers else 1
    assert server.seen.count("stop") >= (1 if succeeds else 0), started
    assert not client._live


@pytest.mark.parametrize(
    ("answer", "end", "code"),
    [
        ({"exit_code": 3}, ProgramEnd.EXITED, 3),
        ({"exit_code": 128 + 11}, ProgramEnd.EXITED, -11),
        ({"exit_code": -9}, ProgramEnd.EXITED, -9),
        ({"exit_code": -1, "end": "timeout"}, ProgramEnd.TIMEOUT, -9),
        ({"exit_code": -9, "end": "memory"}, ProgramEnd.MEMORY, -9),
    ],
)
async def test_rock_client_returns_the_result_of_the_server(answer: dict[str, Any], end: ProgramEnd, code: int) -> None:
    found = await build_client(Rock(execute={"stdout": "", "stderr": "", **answer})).run(Program(code="1", timeout=30))
    assert (found.end, found.return_code) == (end, code)


async def test_program_killed_after_its_time_limit_ends_as_a_timeout() -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/execute"):
            await asyncio.sleep(0.2)
            return httpx.Response(200, json={"status": "Success", "result": {"exit_code": -9}})
        return Rock()(request)

    found = await build_client(answer).run(Program(code="1", timeout=0.1))
    assert found.end is ProgramEnd.TIMEOUT


async def test_number_of_concurrent_rock_sandboxes_is_bounded() -> None:
    client = build_client(Rock(), at_once=1)
    first = await client.create()
    second = asyncio.create_task(client.create())
    await asyncio.sleep(0.05)
    assert not second.done()
    await first.close()
    await (await asyncio.wait_for(second, LONG)).close()


async def test_missing_rock_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SANDBOX_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=r"SANDBOX_TOKEN.*not set"):
        await RockSandboxes(RockSandbox(url="http://127.0.0.1:9", token_env="SANDBOX_TOKEN")).start()
    with pytest.raises(ConfigError, match=r"cannot run programs.*1 tries failed"):
        await RockSandboxes(RockSandbox(url="http://127.0.0.1:9", tries=1)).start()


class Rocklet:
    """A fake rocklet that runs nothing. Its answers are plain JSON objects, not in the format of ROCK's server."""

    def __init__(self, execute: Any, status: int = 200) -> None:
        self.execute, self.status = execute, status
        self.seen: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request.url.path)
        if request.url.path == "/execute":
            return httpx.Response(self.status, json=self.execute)
        return httpx.Response(200, json={"success": True})


async def test_rocklet_requests_have_no_path_prefix_or_envelope() -> None:
    server = Rocklet({"stdout": "1\n", "stderr": "", "exit_code": 0})
    assert (await build_client(server, protocol="rocklet").run(Program(code="1"))).stdout == b"1\n"
    assert server.seen == ["/upload", "/upload", "/execute", "/execute"]
    raised = {"rockletexception": {"message": "Timeout", "class_path": "rock.rocklet.exceptions.CommandTimeoutError"}}
    with pytest.raises(SandboxFailed, match="Timeout"):
        await build_client(Rocklet(raised, 511), protocol="rocklet").run(Program(code="1"))
