"""Tests that every time in output and in names is UTC, whatever the machine's time zone is."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rollflow.flows import nightly
from rollflow.flows.commands.cli import main
from rollflow.flows.locations import new_run_id
from rollflow.flows.services.times import utc_minute, utc_stamp, utc_time
from rollflow.flows.services.utc_lines import UtcLines
from rollflow.flows.views.log_lines import logging_settings
from rollflow.storage.log.entries import RunCreated
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects import open_store
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import FORMAT

AT = 1_769_860_800.0  # 2026-01-31 12:00 UTC, 17:30 in India


@pytest.fixture(autouse=True)
def india(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the machine's time zone to India's, which is 5.5 hours ahead of UTC, and fix the time."""
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    monkeypatch.setattr(time, "time", lambda: AT)
    yield
    monkeypatch.undo()
    time.tzset()


def test_printed_times_are_in_utc() -> None:
    assert utc_time(AT) == "2026-01-31 12:00:00Z"
    assert utc_stamp(AT) == "20260131-120000"
    assert utc_minute(datetime.fromtimestamp(AT).astimezone()) == "2026-01-31 12:00Z"


def test_run_ids_and_commands_use_utc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    monkeypatch.setattr(time, "gmtime", lambda at=None, real=time.gmtime: real(AT if at is None else at))
    run_id = new_run_id("sums")
    assert run_id == "sums-20260131-120000"
    store = open_store(str(tmp_path / "store" / "runs" / run_id))
    config = RunConfig()
    Log(store).create(RunCreated(run_id, config.model_dump(mode="json"), config.sha256(), 1, format=FORMAT))
    for command, shown in ((["status", "--all"], "2026-01-31 12:00Z"), (["log", run_id], "2026-01-31 12:00:00Z")):
        assert main(command) == 0
        out = capsys.readouterr().out
        assert shown in out
        assert "17:30" not in out


def test_log_of_a_run_command_uses_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLFLOW_LOG_FORMAT", raising=False)
    assert logging_settings()["PREFECT_LOGGING_FORMATTERS_JSON_CLASS"] == f"{UtcLines.__module__}.{UtcLines.__name__}"
    record = logging.LogRecord("prefect.flow_runs", logging.INFO, "", 0, "hello", (), None)
    record.created, record.msecs, record.flow_run_name = AT, 7.0, "a run"
    assert UtcLines("default").format(record) == "12:00:00.007Z | INFO    | Flow run 'a run' - hello"


def test_nightly_runs_are_named_by_utc_date() -> None:
    """The schedule uses the time zone in the nightly file, but run names use UTC. So an hour that occurs twice, when
    clocks are set back, gives two names.
    """
    plan = nightly.Nightly(name="night", recipes=("x.toml",), timezone="Europe/Berlin")
    when = datetime.fromtimestamp(AT, UTC)
    assert nightly.render_report(plan, when, []).startswith("# night, 2026-01-31 12:00Z\n")
