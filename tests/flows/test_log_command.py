"""Tests that `rollflow log` prints one line for each log entry, in words or as JSON."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from rollflow.flows.commands.cli import main
from rollflow.flows.commands.log import describe_entry, print_log
from rollflow.storage.errors import ConfigError
from rollflow.storage.log.entries import Entry, Pruned, entry_path
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.records import DiscardReason
from rollflow.tasks.run.context import RunContext
from tests.support.described import describe
from tests.support.log_actors import SIZE, Learner, Scheduler, Supervisor, entries


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    """Build a run whose log contains every kind of entry."""
    store = LocalStore(tmp_path / "run")
    describe(store, config={"group_size": SIZE, "async_ratio": 2.0}, sources=2)
    supervisor = Supervisor(store)
    learner, scheduler = Learner(store, supervisor.writer.claim), Scheduler(store, supervisor.writer.claim)
    learner.publish()
    scheduler.log.follow()
    scheduler.dispatch(0)
    scheduler.discard(0, DiscardReason.FAILED)
    scheduler.commit()
    learner.log.follow()
    learner.publish()
    scheduler.log.follow()
    scheduler.commit()
    learner.log.follow()
    learner.void(1)
    return RunContext(str(tmp_path / "run"), tmp_path / "cache")


def printed(context: RunContext, *, as_json: bool) -> list[str]:
    console = Console(file=io.StringIO(), width=60)
    print_log(context, follow=False, as_json=as_json, console=console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().splitlines()


def test_log_command_prints_a_line_for_each_log_entry(context: RunContext) -> None:
    lines = printed(context, as_json=False)
    words = [
        "run test created by rollflow (unknown)",
        "claimed by a supervisor (process 0 on this machine)",
        "claimed by a learner (process 0 on this machine)",
        "claimed by a scheduler (process 0 on this machine)",
        "version 0 published",
        "batch 0 committed: 2 groups, 14 response tokens; discarded: 1 failed",
        "version 1 published, trained on batch 0 (entry 5)",
        "batch 1 committed: 2 groups, 14 response tokens",
        "batch 1 voided (entry 7): damaged",
    ]
    assert len(lines) == len(words)
    for n, (line, text) in enumerate(zip(lines, words, strict=True)):
        assert line.endswith(text)
        assert line.split()[2] == str(n)


def test_log_command_as_json_equals_the_stored_log(context: RunContext) -> None:
    assert [line.encode() for line in printed(context, as_json=True)] == list(entries(context.store))


def test_log_command_names_the_objects_that_were_deleted() -> None:
    pruned = Entry(9, "", "", "learner", 2, 1, 2, 0.0, Pruned(((0, "state"), (3, "weights"))))
    assert describe_entry(pruned) == "pruned state of version 0, weights of version 3"


def test_audit_repair_changes_the_log_only_with_option_yes(
    context: RunContext, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["audit", "--repair", context.uri]) == 0
    assert "is not damaged" in capsys.readouterr().out
    path = entry_path(8)
    whole = context.store.get(path)
    context.store.put(path, whole[:-5])
    assert main(["log", context.uri]) == 1
    assert f"{path} is not an entry of a log" in capsys.readouterr().err
    assert main(["audit", "--repair", context.uri]) == 1
    out = capsys.readouterr().out
    assert "move the entry away, so that the log ends with entry 7" in out
    assert "nothing was changed" in out
    assert context.store.get(path) == whole[:-5]
    assert main(["audit", "--repair", context.uri, "--yes"]) == 0
    assert "can be resumed" in capsys.readouterr().out
    assert main(["log", context.uri]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 8
    assert main(["audit", "--repair", f"{context.uri}-not"]) == 2
    assert "there is no run in" in capsys.readouterr().err


def test_log_command_refuses_a_missing_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such run"):
        print_log(RunContext(str(tmp_path / "none"), tmp_path / "cache"), follow=False, as_json=False)
