"""Finds the first exception in the exception group that failed asyncio tasks raise together."""

from __future__ import annotations

from typing import Any


def find_first_cause(failed: BaseExceptionGroup[Any]) -> BaseException:
    """Return the first exception inside nested exception groups."""
    inner = failed.exceptions[0]
    return find_first_cause(inner) if isinstance(inner, BaseExceptionGroup) else inner
