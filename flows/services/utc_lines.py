"""Formats log lines as Prefect does, but with the time in UTC."""

from __future__ import annotations

import time

from prefect.logging.formatters import PrefectFormatter

START = "%(asctime)s.%(msecs)03dZ | %(levelname)-7s | "


class UtcLines(PrefectFormatter):
    """A formatter of log lines: Prefect's own formatter with the time in UTC."""

    converter = time.gmtime  # type: ignore[assignment] # as the documentation of `logging` says

    def __init__(self, *_: object) -> None:
        """Set the formats of log lines; ignore all arguments, which are meant for Prefect's own formatter."""
        flow_run, task_run = (
            f"{START}{kind} run %({kind.lower()}_run_name)r - %(message)s" for kind in ("Flow", "Task")
        )
        super().__init__(f"{START}%(name)s - %(message)s", "%H:%M:%S", flow_run_fmt=flow_run, task_run_fmt=task_run)
