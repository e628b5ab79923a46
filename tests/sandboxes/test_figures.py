"""Tests the counters of each kind of sandbox, in this process and in worker processes."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollflow.storage.run_records.sandbox_figures import SandboxFigures
from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.sandboxes import figures
from rollflow.tasks.sandboxes.base import Capability, ExecResult, Program, ProgramEnd, SandboxFailed
from rollflow.tasks.sandboxes.bubblewrap import BubblewrapSandboxes
from rollflow.tasks.sandboxes.config import BubblewrapSandbox, RockSandbox, RunCodeSandbox
from rollflow.tasks.sandboxes.figures import KINDS, KindCounter, ProcessFigures
from rollflow.tasks.sandboxes.rock import RockSandboxes
from rollflow.tasks.sandboxes.run_code import RunCodeSandboxes, read_answer
from rollflow.tasks.scorers import build_scorers
from rollflow.tasks.scorers.base import ScoreRequest
from rollflow.tasks.scorers.config import CodeReward
from tests.support.sandbox_kinds import LONG, start_and_close, start_kind, wait_until, warm

HEAVY = "x = b'x' * (300 << 20)\nwhile True: pass"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> ProcessFigures:
    """Return counters of this process that only this test uses."""
    fresh = ProcessFigures()
    monkeypatch.setattr(figures, "figures_of_process", lambda: fresh)
    monkeypatch.setattr("rollflow.tasks.scorers.worker_process.figures_of_process", lambda: fresh)
    return fresh


@pytest.mark.parametrize("kind", KINDS)
async def test_ends_of_programs_are_counted_for_each_kind(counted: ProcessFigures, kind: str) -> None:
    async with start_kind(kind) as sandboxes:
        before = counted.read()[kind] if kind in counted.read() else SandboxFigures()
        assert before.programs == before.in_use == 0, "the program that checks the sandboxes does not count"
        for _ in range(3):
            assert (await sandboxes.run(warm("print(1)"))).succeeded
        late = await sandboxes.run(Program(code="while True: pass", timeout=0.3))
        running = asyncio.create_task(sandboxes.run(warm("import time; time.sleep(60)")))
        await wait_until(
            lambda: counted.read()[kind].started - before.started == 5 and counted.read()[kind].in_use == 1
        )
        await asyncio.sleep(0.3)  # a sandbox of a ROCK server is in use before its program starts
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert late.end is ProgramEnd.TIMEOUT
        found = counted.read()[kind]
        assert found.ends == {"exited": 3, "timeout": 1, "stopped": 1}
        assert sum(found.times.values()) == 4
        assert found.started - before.started == 5
        assert found.in_use == found.failures == 0
        assert found.seconds >= (0.3 if Capability.NAMED_LIMITS in sandboxes.capabilities else 0.0)
        slowest = found.find_quantile(1.0)
        assert slowest is not None


async def test_renewed_and_replaced_sandboxes_are_counted(counted: ProcessFigures) -> None:
    async with start_and_close(BubblewrapSandboxes(BubblewrapSandbox(spares=1))) as sandboxes:
        assert (await sandboxes.run(warm("print(1)"))).succeeded
        assert (await sandboxes.run(warm("print(2)"))).succeeded
        await sandboxes.run(warm("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
        await sandboxes.run(Program(command=["true"], timeout=LONG, keep_children=True))
        await sandboxes.run(warm(HEAVY))
        await sandboxes.run(Program(code="while True: pass", timeout=0.1))
        found = counted.read()["bubblewrap"]
    assert found.ends == {"exited": 4, "memory": 1, "timeout": 1}
    assert found.renewed == 3  # after the check, and after each of the first two programs
    assert found.replaced == {"signal": 1, "children": 1, "memory": 1, "timeout": 1}


async def test_killed_sandbox_counts_as_failure_and_replacement(counted: ProcessFigures) -> None:
    async with start_and_close(BubblewrapSandboxes(BubblewrapSandbox(spares=0))) as sandboxes:
        running = asyncio.create_task(sandboxes.run(warm("import time; time.sleep(60)")))
        await wait_until(lambda: counted.read()["bubblewrap"].in_use == 1)
        assert isinstance(sandboxes, BubblewrapSandboxes)
        assert sandboxes._process is not None
        os.kill(sandboxes._process.pid, signal.SIGKILL)
        with pytest.raises(SandboxFailed):
            await running
        await wait_until(sandboxes._has_died)
        assert (await sandboxes.run(warm("print(1)"))).succeeded
        found = counted.read()["bubblewrap"]
    assert (found.failures, found.ends, found.in_use) == (1, {"exited": 1}, 0)
    assert found.replaced == {"failed": 1, "parent ended": 1}


async def test_sandbox_creation_fails_at_once_if_the_box_is_killed() -> None:
    async with start_and_close(BubblewrapSandboxes(BubblewrapSandbox(spares=0))) as sandboxes:
        assert isinstance(sandboxes, BubblewrapSandboxes)
        assert sandboxes._process is not None
        box = psutil.Process(sandboxes._process.pid)
        for process in (box, *box.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # processes of the first program may end now
                process.suspend()
        creating = asyncio.create_task(sandboxes.create())
        await asyncio.sleep(0.2)
        box.kill()
        with pytest.raises(SandboxFailed, match="killed"):  # at once, not after the 30 s that a creation may take
            await creating


async def test_each_try_on_a_server_without_answer_is_counted(
    counted: ProcessFigures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollflow.tasks.sandboxes.run_code.FIRST_PAUSE", 0.001)
    sandboxes = RunCodeSandboxes(RunCodeSandbox(url="http://127.0.0.1:9/run_code", tries=3))
    with pytest.raises(SandboxFailed):
        await sandboxes.run(Program(code="1"))
    await sandboxes.close()
    assert counted.read() == {"run-code": SandboxFigures(3, replaced={"failed": 2}, failures=1)}


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 1e300])
async def test_any_duration_reported_by_a_server_is_counted(counted: ProcessFigures, seconds: float) -> None:
    run = {"status": "Finished", "return_code": 0, "execution_time": seconds}

    async def answer() -> ExecResult:
        return read_answer({"status": "Success", "run_result": run})

    await KindCounter("run-code").watch(answer())
    found = counted.read()["run-code"]
    assert found.ends == {"exited": 1}
    assert 0.0 <= found.seconds <= figures.LONGEST_SECONDS


async def test_request_in_the_queue_uses_no_sandbox(counted: ProcessFigures) -> None:
    async with start_kind("run-code") as started:
        assert isinstance(started, RunCodeSandboxes)
        config = started._config.model_copy(update={"at_once": 1})
        async with start_and_close(RunCodeSandboxes(config)) as sandboxes:
            before = counted.read()["run-code"].started
            running = [asyncio.create_task(sandboxes.run(warm("import time; time.sleep(1)"))) for _ in range(3)]
            await wait_until(lambda: counted.read()["run-code"].in_use > 0)
            assert (counted.read()["run-code"].in_use, counted.read()["run-code"].started) == (1, before + 1)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        assert counted.read()["run-code"].in_use == 0


async def test_sandbox_that_cannot_be_created_counts_as_a_failure(
    counted: ProcessFigures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollflow.tasks.sandboxes.rock.FIRST_PAUSE", 0.001)
    remote = RockSandboxes(RockSandbox(url="http://127.0.0.1:9", tries=3))
    with pytest.raises(SandboxFailed):
        await remote.run(Program(code="1"))
    await remote.close()
    assert counted.read() == {"rock": SandboxFigures(replaced={"failed": 2}, failures=1)}
    async with start_kind("unsafe-process") as local:
        before = counted.read()["unsafe-process"]
        await local.close()
        monkeypatch.setattr(local, "_build_command", lambda _: ["/bin/false"])
        with pytest.raises(SandboxFailed):
            await local.run(Program(code="1"))
        assert counted.read()["unsafe-process"] == before + SandboxFigures(failures=1)


async def test_code_and_commands_of_a_workspace_are_counted(counted: ProcessFigures) -> None:
    async with start_kind("bubblewrap") as sandboxes:
        workspace = await sandboxes.open_workspace()
        assert counted.read()["bubblewrap"].in_use == 1
        session = await workspace.open_session()
        await session.run("echo 1", LONG)
        await session.run("sleep 600", 0.2)
        await workspace.exec(Program(command=["true"], timeout=LONG))
        assert await workspace.is_alive()
        await workspace.close()
        await workspace.close()
        found = counted.read()["bubblewrap"]
    assert (found.ends, found.in_use) == ({"exited": 2, "timeout": 1}, 0)


async def test_sandbox_counters_survive_the_death_of_a_worker(counted: ProcessFigures, tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    policy.mkdir()
    for name, data in build_cold_folder(ColdStart(), ["print(1)"]).items():
        (policy / name).write_bytes(data)
    config: Any = {"kind": "code", "fenced": False, "workers": 1, "sandbox": {"kind": "unsafe-process"}}
    scorer = build_scorers({"": CodeReward.model_validate(config)}, policy)
    request = ScoreRequest(
        Int32s.of(PolicyTokenizer(policy).encode_response("print(1)")),
        {"cases": [{"stdin": "", "stdout": "1"}, {"stdin": "", "stdout": "2"}]},
    )
    await scorer.start()
    try:
        assert [score.value for score in await scorer.score([request] * 3)] == [0.5] * 3
        assert counted.read()["unsafe-process"].programs == 6
        [worker] = [one for one in psutil.Process().children() if "rollflow.tasks.scorers.worker" in one.cmdline()]
        worker.kill()
        assert [score.value for score in await scorer.score([request])] == [0.5]
        assert counted.read()["unsafe-process"].programs == 8
    finally:
        await scorer.close()
    found = counted.read()["unsafe-process"]
    assert (found.programs, found.in_use) == (8, 0)
    assert len(counted._children) == 0


def test_shared_counters_keep_earlier_counts() -> None:
    parent, child = ProcessFigures(), ProcessFigures()
    place = KINDS.index("rock") * figures.SIZE
    child.add(place, 2)
    with parent.open_child() as (board, fd):
        child.share(os.dup(fd))
    child.add(place, 3)
    child.add(place + figures.PLACES["in_use"], 1)
    assert parent.read() == {"rock": SandboxFigures(5, in_use=1)}
    parent.close_child(board)  # the child process was killed while it used a sandbox
    parent.close_child(board)
    assert parent.read() == {"rock": SandboxFigures(5)}


def test_counters_have_the_sandbox_kinds_of_the_config() -> None:
    from rollflow.tasks.sandboxes.config import SandboxConfig

    union = SandboxConfig.__origin__.__args__  # type: ignore[attr-defined]
    assert {one.model_fields["kind"].default for one in union} == set(KINDS)
    assert KindCounter("rock")
