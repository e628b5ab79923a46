"""Tests JSON log lines: the output of a flow's process, and how `rollflow log --processes` shows it as text or JSON."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from rollflow.flows.views import log_lines
from rollflow.flows.views.log_lines import FORM, LogLines, as_json, format_line, logging_settings, set_log_facts
from rollflow.storage.errors import ConfigError
from tests.support.waiting import RUN_SECONDS

SAID = """
from prefect.logging.configuration import setup_logging
from rollflow.flows.views.log_lines import set_log_facts
import logging
setup_logging()
set_log_facts(run="one", actor="learner")
logging.getLogger("prefect.said").info("a [red]line[/] of %d letters " + 300 * "x", 3)
"""


@pytest.fixture(autouse=True)
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "_about", {})


def test_process_writes_its_log_as_json_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORM, "json")
    environment = os.environ | {"PREFECT_LOGGING_LEVEL": "INFO"} | logging_settings()
    done = subprocess.run(
        [sys.executable, "-c", SAID], env=environment, capture_output=True, text=True, check=True, timeout=RUN_SECONDS
    )
    (line,) = done.stderr.splitlines()
    said = json.loads(line)
    assert said.pop("time")
    message = "a [red]line[/] of 3 letters " + 300 * "x"
    assert said == {"level": "INFO", "run": "one", "actor": "learner", "message": message}


def test_default_log_format_is_that_of_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FORM, raising=False)
    assert logging_settings()["PREFECT_LOGGING_FORMATTERS_JSON_CLASS"].endswith(".UtcLines")
    assert logging_settings(shared=True)  # all runs of `rollflow serve` share one log, so each line must name its run
    monkeypatch.setenv(FORM, "xml")
    with pytest.raises(ConfigError, match=r"ROLLFLOW_LOG_FORMAT = 'xml': .* is 'text' or 'json'"):
        logging_settings()


def test_log_record_fields_override_the_process_fields() -> None:
    set_log_facts(run="one", version=3, attempt=2)
    record = logging.LogRecord("prefect.flow_runs", logging.WARNING, "", 0, "odd: %s", ("so",), None)
    vars(record).update(flow_name="train", version=4, rank=1)
    said = json.loads(LogLines().format(record))
    assert said["rank"] == 1
    assert (said["run"], said["stage"], said["version"], said["attempt"]) == ("one", "train", 4, 2)
    assert (said["level"], said["message"], "error" in said) == ("WARNING", "odd: so", False)


def test_exception_text_is_part_of_its_json_log_line() -> None:
    try:
        raise ValueError("bad")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "failed", (), sys.exc_info())
    line = LogLines().format(record)
    assert "\n" not in line
    assert "ValueError: bad" in json.loads(line)["error"]
    assert format_line(line).endswith("ValueError: bad")


def test_log_line_is_read_as_text_or_json() -> None:
    assert format_line("12:00:00.000 | INFO    | x") == "12:00:00.000 | INFO    | x"
    assert json.loads(as_json("12:00 | x", "one")) == {"run": "one", "message": "12:00 | x"}
    line = '{"time": "2026-01-01T12:00:00.000+00:00", "level": "INFO", "stage": "train", "message": "hello"}'
    assert as_json(line, "one") == line
    assert format_line(line) == "12:00:00.000Z | INFO    | train - hello"
    assert format_line("7") == "7"
