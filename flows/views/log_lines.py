"""Log lines for machines: with `ROLLFLOW_LOG_FORMAT=json` one JSON object a line, with who says it and of which run.

    {"time": "2026-01-01T12:00:00.000+00:00", "level": "INFO", "run": "one", "stage": "train", "actor": "learner",
     "version": 7, "attempt": 1, "message": "recovered ..."}

What is not known of a line is not in it: a runner's own line is of no run. `text` reads a line back for people.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime

from rollflow.storage.errors import ConfigError

FORM = "ROLLFLOW_LOG_FORMAT"
FACTS = ("run", "stage", "actor", "rank", "version", "attempt")
UTC_LINES = "rollflow.flows.services.utc_lines.UtcLines"  # by name: only a runner imports Prefect
_about: dict[str, object] = {}  # of this process, which is one flow run's; logging itself is one for a process, too


def about(**facts: object) -> None:
    """Say in every line of this process from now on, which run it is of, and where that is; some of `FACTS`."""
    _about.update(facts)


def settings(*, shared: bool = False) -> dict[str, str]:
    """The environment of a runner whose lines are in the form that is asked for; of a `shared` one all are JSON.

    Its runs write into one file, and only JSON says which line is whose.

    Raises:
        ConfigError: there is no such form.
    """
    match os.environ.get(FORM, "text"):
        case "text" if not shared:
            return _formatter(UTC_LINES)
        case "text" | "json":
            return {**_formatter(f"{__name__}.{LogLines.__name__}"), "PREFECT_LOGGING_COLORS": "false"}
        case other:
            raise ConfigError(f"{FORM} = {other!r}: a log is written as 'text' or as 'json'")


def _formatter(name: str) -> dict[str, str]:
    """Return the settings that make Prefect's logging use the formatter of this import path."""
    return {
        "PREFECT_LOGGING_FORMATTERS_JSON_CLASS": name,
        "PREFECT_LOGGING_HANDLERS_CONSOLE_FORMATTER": "json",
    }


class LogLines(logging.Formatter):
    """One JSON object for each record. A fact of the record itself is told before that of the process."""

    def __init__(self, *_: object) -> None:
        """Prefect's logging gives the format of its own formatter, which says nothing here."""
        super().__init__()

    def format(self, record: logging.LogRecord) -> str:
        """See the module's docstring."""
        known = {"stage": getattr(record, "flow_name", None)} | _about
        facts = {name: getattr(record, name, known.get(name)) for name in FACTS}
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            **{name: fact for name, fact in facts.items() if fact is not None},
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def is_of(line: str, run: str) -> bool:
    """Whether a line of a log that is shared says that it is of this run."""
    told = _read(line)
    return told is not None and told.get("run") == run


def as_json(line: str, run: str) -> str:
    """A line of a log, in whichever form, as JSON: of one that is not, all that is known is its run."""
    return line if _read(line) else json.dumps({"run": run, "message": line})


def text(line: str) -> str:
    """A line of a log, in whichever form, for people."""
    told = _read(line)
    if told is None:
        return line
    who = " ".join(str(told[name]) for name in ("stage", "actor") if name in told)
    said = f"{who} - {told['message']}" if who else told["message"]
    error = f"\n{told['error']}" if "error" in told else ""
    return f"{str(told.get('time', ''))[11:23]}Z | {told.get('level', ''):7} | {said}{error}"


def _read(line: str) -> Mapping[str, object] | None:
    try:
        told = json.loads(line)
    except ValueError:
        return None
    return told if isinstance(told, dict) and "message" in told else None
