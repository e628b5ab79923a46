"""Collects the final responses to a prompt, for a scorer that compares responses with each other.

    episode --arrive(response)--> waits until every kept episode has arrived or left --> the other responses
            --leave()-----------> it ended without a final response to score

Waiting for the other responses delays no group, because a group ends only after all its episodes. `cancel` ends the
wait when the group of responses is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence


class GroupPeers:
    """Collects the final responses to one prompt, so that a scorer can compare them."""

    def __init__(self, size: int) -> None:
        """Expect final responses from `size` episodes."""
        self._size = size
        self._arrived: dict[int, Sequence[int]] = {}
        self._left: set[int] = set()
        self._complete = asyncio.Event()
        self._is_cancelled = False

    async def arrive(self, sample: int, tokens: Sequence[int]) -> list[Sequence[int]] | None:
        """Add a final response, and wait for the other final responses to the prompt; return None if the group was
        given up."""
        self._arrived[sample] = tokens
        self._check()
        await self._complete.wait()
        if self._is_cancelled:
            return None
        return [self._arrived[other] for other in sorted(self._arrived) if other != sample]

    def leave(self, sample: int) -> None:
        """Record that an episode has ended, so that no other episode waits for its final response."""
        if sample not in self._arrived:
            self._left.add(sample)
            self._check()

    def cancel(self) -> None:
        """End all waits for final responses, because the group of responses was given up."""
        self._is_cancelled = True
        self._complete.set()

    def _check(self) -> None:
        if len(self._arrived) + len(self._left) >= self._size:
            self._complete.set()
