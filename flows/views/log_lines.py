"""Formats log lines so that other programs can read them. With `ROLLFLOW_LOG_FORMAT=json`, each log line is a JSON
object with the message, its author and its run.

    {"time": "2026-01-01T12:00:00.000+00:00", "level": "INFO", "run": "one", "stage": "train", "actor": "learner",
     "version": 7, "attempt": 1, "message": "recovered ..."}

Unknown facts are left out: a line of the runner itself has no key `run`. `format_line` converts a line to plain text
for users.
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
# Import path of the text formatter. It is not imported here, because only a runner imports Prefect.
UTC_LINES = "rollflow.flows.services.utc_lines.UtcLines"
# Facts that each log line of this process contains. They are global, because this process executes only one flow run.
_about: dict[str, object] = {}


def set_log_facts(**facts: object) -> None:
    """Add facts, such as the run id, to all later log lines of this process. `FACTS` lists the possible facts."""
    _about.update(facts)


def logging_settings(*, shared: bool = False) -> dict[str, str]:
    """Return the environment variables that set a Prefect runner's log format to the one in `ROLLFLOW_LOG_FORMAT`. A
    `shared` runner, which serves several runs, always logs JSON.

    All runs of a shared runner write to the same log file, in which only JSON lines say which run they belong to.

    Raises:
        ConfigError: `ROLLFLOW_LOG_FORMAT` has an unknown value.
    """
    match os.environ.get(FORM, "text"):
        case "text" if not shared:
            return _formatter(UTC_LINES)
        case "text" | "json":
            return {**_formatter(f"{__name__}.{LogLines.__name__}"), "PREFECT_LOGGING_COLORS": "false"}
        case other:
            raise ConfigError(
                f"{FORM} = {other!r}: the format of a log is 'text' or 'json'; set {FORM} to one of the two"
            )


def _formatter(name: str) -> dict[str, str]:
    """Return the logging settings with which Prefect uses the formatter that has the import path `name`."""
    return {
        "PREFECT_LOGGING_FORMATTERS_JSON_CLASS": name,
        "PREFECT_LOGGING_HANDLERS_CONSOLE_FORMATTER": "json",
    }


class LogLines(logging.Formatter):
    """Formats each record of Python's logging as one JSON object. A value in a log record, such as `run`, has priority
    over the value that was given to `set_log_facts`.
    """

    def __init__(self, *_: object) -> None:
        """Ignore the arguments, which Prefect passes for its own formatter class."""
        super().__init__()

    def format(self, record: logging.LogRecord) -> str:
        """Return the log record as one JSON object."""
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
    """Return whether a line of a log file that several runs share belongs to the run `run`."""
    parsed = _parse(line)
    return parsed is not None and parsed.get("run") == run


def as_json(line: str, run: str) -> str:
    """Return a log line of any format as JSON. The object of a text line has only the fields `run` and `message`."""
    return line if _parse(line) else json.dumps({"run": run, "message": line})


def format_line(line: str) -> str:
    """Return a log line of any format as a line of plain text."""
    parsed = _parse(line)
    if parsed is None:
        return line
    author = " ".join(str(parsed[name]) for name in ("stage", "actor") if name in parsed)
    message = f"{author} - {parsed['message']}" if author else parsed["message"]
    error = f"\n{parsed['error']}" if "error" in parsed else ""
    return f"{str(parsed.get('time', ''))[11:23]}Z | {parsed.get('level', ''):7} | {message}{error}"


def _parse(line: str) -> Mapping[str, object] | None:
    try:
        parsed = json.loads(line)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) and "message" in parsed else None
