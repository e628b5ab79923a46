"""A tool: counts a letter in a word."""

from __future__ import annotations

from rollflow.tasks.environments.tools import ToolResult


async def count(letter: str, word: str, *, text: str = "={}, so ") -> ToolResult:
    """Return the count in `text`; the policy reads the text."""
    return ToolResult(text.format(word.count(letter)))
