"""Tests that a user can end a run through its storage, at the next version or at once, and that resuming the run
removes the request.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect import flow
from prefect.states import Pending, Running, Scheduled, Suspended

from rollflow.flows import steps as steps_module
from rollflow.flows.commands.cli import main
from rollflow.flows.keepalive import run_watch as following_module
from rollflow.flows.keepalive.run_watch import RunWatch
from rollflow.flows.locations import find_run, run_home
from rollflow.flows.post_training import _describe_failure
from rollflow.flows.registration.prefect_api import open_client, requested_at
from rollflow.flows.services.process import PrefectServer
from rollflow.flows.steps import split_blocks
from rollflow.flows.views.status import STATUS, RunStatus
from rollflow.storage.errors import RollflowError
from rollflow.storage.objects import open_store
from rollflow.storage.run_records.stop_requests import REQUEST, RunEnded, read_request, request_stop, take_back
from rollflow.tasks.run.context import RunContext
from tests.support.described import describe
from tests.support.prefect_home import use_server
from tests.support.waiting import HANG_SECONDS, until


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunContext:
    """Make a run whose status is at version 3 of 9."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ROLLFLOW_STORE", str(tmp_path / "store"))
    describe(open_store(f"{tmp_path}/store/runs/one"), "one")
    context = find_run("one")
    tell(context, RunStatus("one", "training", 3, 9, seconds=1.0))
    return context


def tell(context: RunContext, status: RunStatus) -> None:
    context.store.put(STATUS, status.to_json().encode())


def test_stop_request_is_valid_until_withdrawn(run: RunContext) -> None:
    assert read_request(run.store) is None
    first = request_stop(run.store, "stop")
    assert first == read_request(run.store)
    # a new request, because the first one may concern the run before it was resumed
    assert request_stop(run.store, "stop").at > first.at
    assert request_stop(run.store, "cancel").how == "cancel"
    assert request_stop(run.store, "stop").how == "cancel"
    take_back(run.store, time.time() + 1)
    take_back(run.store, time.time() + 1)
    assert read_request(run.store) is None


def test_stop_request_made_during_the_start_is_kept(run: RunContext) -> None:
    """A stop request must not be lost if it comes between the run's start and the supervisor's first log entry."""
    asked = request_stop(run.store, "stop")
    take_back(run.store, asked.at - 1.0)
    assert read_request(run.store) == asked
    take_back(run.store, asked.at + 1.0)
    assert read_request(run.store) is None


@pytest.mark.slow
@pytest.mark.xdist_group("prefect")
def test_request_time_of_a_flow_run_is_its_start_or_resumption(prefect_server: PrefectServer) -> None:
    """The time is that of the start, retry or resumption, not when the server notices it late or the process begins."""
    with use_server(prefect_server), open_client() as client:
        began = time.time()
        made = client.create_flow_run(flow(lambda: None, name="nothing"), state=Scheduled())
        first = requested_at(made.id)
        assert began - 1 <= first <= time.time() + 1
        late = Scheduled(name="Late", scheduled_time=made.expected_start_time)
        for state in (late, Pending(), Running(), Suspended()):
            client.set_flow_run_state(made.id, state, force=True)
        assert requested_at(made.id) == pytest.approx(first, abs=0.5)
        time.sleep(1.5)
        client.set_flow_run_state(made.id, Scheduled(name="Resuming"), force=True)
        assert requested_at(made.id) > first + 1


@pytest.mark.parametrize("text", [b"", b"[]", b'{"how": "later", "at": 1}', b'{"how": "stop"}'])
def test_unreadable_stop_request_is_ignored(run: RunContext, text: bytes) -> None:
    run.store.put(REQUEST, text)
    assert read_request(run.store) is None
    take_back(run.store, time.time() + 1)


def followed(run: RunContext, monkeypatch: pytest.MonkeyPatch, looks: Callable[[Any], None]) -> list[str]:
    """Watch a run whose version grows by one at each check, from version 3 on. Return the messages to users.

    `looks` is called with the run's stages at each check.
    """
    monkeypatch.setattr(following_module, "TELL_SECONDS", -1.0)
    monkeypatch.setattr(following_module, "POLL_SECONDS", 0.0)
    progress, messages = SimpleNamespace(version=2), list[str]()

    def look() -> None:
        progress.version += 1
        looks(stages)

    stages: Any = SimpleNamespace(
        paused=False, progress=progress, have_ended=lambda *_: progress.version > 8, look=look
    )
    writer: Any = SimpleNamespace(context=run, progress=progress, messages=messages, refresh=lambda: None)
    supervisor: Any = SimpleNamespace(check=lambda: None)
    try:
        RunWatch(stages, writer, supervisor).to_end()
    except RunEnded as why:
        messages.append(str(why))
    return messages


def test_stop_command_ends_the_run_at_the_next_version(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def looks(stages: Any) -> None:
        if stages.progress.version == 5:
            request_stop(run.store, "stop")

    told = followed(run, monkeypatch, looks)
    assert told == [
        "the run ends at its next version, because of `rollflow stop`",
        "the run was stopped at version 6 by `rollflow stop`",
    ]


def test_stop_after_the_last_version_lets_the_run_finish(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def looks(stages: Any) -> None:
        if stages.progress.version == 9:
            request_stop(run.store, "stop")

    assert followed(run, monkeypatch, looks) == ["the run ends at its next version, because of `rollflow stop`"]


def test_cancel_request_ends_the_run_immediately(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    request_stop(run.store, "cancel")
    assert followed(run, monkeypatch, lambda stages: None) == ["the run was cancelled by `rollflow stop --now`"]


def test_pausing_a_run_is_immediate_and_is_not_a_failure(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def looks(stages: Any) -> None:
        stages.paused = stages.progress.version == 4

    assert followed(run, monkeypatch, looks) == ["the run was paused, because a user paused its flow run in Prefect"]
    assert _describe_failure(RunEnded("paused", pause=True))[0] == "paused"
    assert _describe_failure(RunEnded("stopped"))[0] == "stopped"
    assert _describe_failure(RollflowError("broken"))[0] == "failed"


@pytest.mark.parametrize("asked", ["pause", "cancel", "stop", None])
def test_trained_run_can_be_paused_or_cancelled(run: RunContext, asked: Any) -> None:
    """The request is noticed after evaluation and audit; a stop has no version to wait for."""

    def look() -> None:
        stages.paused = asked == "pause"

    stages: Any = SimpleNamespace(paused=False, look_at_own=look)
    writer: Any = SimpleNamespace(context=run, progress=SimpleNamespace(version=9), messages=[])
    if asked in ("cancel", "stop"):
        request_stop(run.store, asked)
    following = RunWatch(stages, writer, SimpleNamespace())  # type: ignore[arg-type]
    if asked in ("pause", "cancel"):
        with pytest.raises(RunEnded, match=r"paused|cancelled") as ended:
            following.check_stop_requests()
        assert ended.value.pause == (asked == "pause")
    else:
        following.check_stop_requests()


@pytest.mark.parametrize(("words", "how"), [(["stop"], "stop"), (["stop", "--now"], "cancel")])
def test_stop_command_waits_for_the_end(
    run: RunContext, capsys: pytest.CaptureFixture[str], words: list[str], how: str
) -> None:
    codes: list[int] = []
    command = threading.Thread(target=lambda: codes.append(main([*words, "one"])))
    command.start()
    until(lambda: read_request(run.store) is not None)
    asked = read_request(run.store)
    assert asked is not None
    assert asked.how == how
    assert command.is_alive()
    tell(run, RunStatus("one", "stopped", 4, 9, seconds=2.0))
    command.join()
    assert codes == [0]
    assert (
        f"run one has ended at version 4 of 9; continue the run with: rollflow resume {run.uri}"
        in capsys.readouterr().out
    )


def test_stop_command_does_not_wait_for_a_paused_run(
    run: RunContext, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollflow.flows.commands.stop.SILENT_SECONDS", 5.0)
    command = threading.Timer(0.1, lambda: tell(run, RunStatus("one", "paused", 4, 9, seconds=1.0)))
    command.start()
    assert main(["stop", "one"]) == 0
    assert "run one is paused at version 4 of 9; continue the run with" in capsys.readouterr().out


def test_stop_command_returns_at_once_with_no_wait(run: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", "one", "--no-wait"]) == 0
    assert read_request(run.store) is not None
    assert "run one was asked to end at its next version" in capsys.readouterr().out


@pytest.mark.parametrize("phase", ["done", "failed", "stopped", "paused"])
def test_stop_command_writes_no_request_for_an_ended_run(
    run: RunContext, capsys: pytest.CaptureFixture[str], phase: Any
) -> None:
    tell(run, RunStatus("one", phase, 4, 9))
    assert main(["stop", "one"]) == 0
    assert read_request(run.store) is None
    assert f"run one is not running ({phase})" in capsys.readouterr().out


def test_stop_command_waits_a_bounded_time_for_a_silent_run(
    run: RunContext, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollflow.flows.commands.stop.SILENT_SECONDS", 0.0)
    monkeypatch.setattr("rollflow.flows.commands.stop.LOOK_SECONDS", 0.0)
    assert main(["stop", "one"]) == 1
    assert "run one has not ended: at version 3 of 9" in capsys.readouterr().err


def log_of(name: str, *lines: str) -> Path:
    file = run_home() / "logs" / name / "runner.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as log:
        log.writelines(f"{line}\n" for line in lines)
    return file


def said(run: str, message: str) -> str:
    return json.dumps({"level": "INFO", "run": run, "message": message})


@pytest.mark.parametrize("options", [[], ["--follow"]])
def test_log_command_reads_logs_of_run_command_and_servers(
    run: RunContext, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert main(["log", "--processes", "one", *options]) == 2
    assert "have no line of run" in capsys.readouterr().err
    tell(run, replace(RunStatus("one", "done"), version=9))
    log_of("rollflow", said("two", "of two"), "Traceback", '{"message": "of nobody"}', "7")
    assert main(["log", "--processes", "one", *options]) == 2
    assert "have no line of run" in capsys.readouterr().err
    log_of("rollflow", said("one", "of one"))
    log_of(run.key, "its own session's")
    assert main(["log", "--processes", *options, "one"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert (first, second.endswith("of one")) == ("its own session's", True)


def test_log_command_follows_a_run_on_background_servers(run: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    log_of("rollflow", said("two", "of two"))
    codes: list[int] = []
    follow = ["log", "--processes", "one", "--follow"]
    command = threading.Thread(target=lambda: codes.append(main(follow)), daemon=True)
    command.start()
    err = out = ""

    def printed(where: str, what: str) -> bool:
        nonlocal out, err
        more = capsys.readouterr()
        out, err = out + more.out, err + more.err
        return what in (out if where == "out" else err)

    until(lambda: printed("err", "run one has no line in"))
    log_of("rollflow", said("one", "hello"), said("two", "of two"))
    until(lambda: printed("out", "hello"))
    tell(run, replace(RunStatus("one", "done"), version=9))
    command.join(HANG_SECONDS)
    assert codes == [0]
    printed("err", "")
    assert err.count("yet") == 1
    assert "of two" not in out


@pytest.mark.parametrize("options", [[], ["--follow"]])
def test_process_logs_are_shown_as_text_and_json(
    run: RunContext, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_home() / "logs" / run.key / "runner.log"
    file.parent.mkdir(parents=True)
    file.write_text('{"time": "2026-01-01T12:00:00.000+00:00", "level": "INFO", "message": "hello"}\nplain\ncut')
    tell(run, replace(RunStatus("one", "done"), version=9))
    assert main(["log", "--processes", "one", *options]) == 0
    assert capsys.readouterr().out == "12:00:00.000Z | INFO    | hello\nplain\ncut\n"
    assert main(["log", "--processes", "one", "--json", *options]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["message"] for one in said] == ["hello", "plain", "cut"]


@pytest.mark.parametrize(("versions", "most"), [(1, 1), (12, 12), (20, 20), (21, 11), (200, 20), (1999, 20)])
def test_progress_table_has_at_most_twenty_version_ranges(versions: int, most: int) -> None:
    found = list(split_blocks(0, versions))
    assert len(found) == most <= steps_module.BLOCKS
    covered = [version for first, last in found for version in range(first, last + 1)]
    assert covered == list(range(1, versions + 1))


def test_restarted_supervisor_uses_the_same_version_ranges() -> None:
    assert list(split_blocks(95, 200))[:2] == [(96, 100), (101, 110)]
    assert next(split_blocks(100, 200)) == (101, 110)
    assert list(split_blocks(-1, 3)) == [(1, 1), (2, 2), (3, 3)]
    assert list(split_blocks(200, 200)) == []
