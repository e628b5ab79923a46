"""Formats times for people and for file names, always in UTC, so that times of different machines and logs can be
compared.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime


def utc_time(at: float) -> str:
    """Format a time (seconds since the epoch) for people: 2026-01-31 12:00:00Z."""
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(at))


def utc_stamp(at: float | None = None) -> str:
    """Format a time (by default, the current time) as part of a name: 20260131-120000."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(at))


def utc_minute(when: datetime) -> str:
    """Format a time for people, to the minute: 2026-01-31 12:00Z."""
    return f"{when.astimezone(UTC):%Y-%m-%d %H:%MZ}"
