"""Configures vLLM's speculative decoding, and feeds past responses of a run to an engine that drafts from them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from rollflow.storage.errors import EngineFailed
from rollflow.tasks.engines.config import EngineConfig, VllmEngineConfig

PROPOSER = "rollflow.tasks.engines.vllm.drafts.PastDrafts"
SHORTEST_NGRAM, LONGEST_NGRAM = 2, 5  # fewest and most newest tokens that `ngram` searches in prompt and response

PastResponse: TypeAlias = tuple[bytes, bytes]  # a prompt and the tokens that followed it, as 32-bit integers
ReadPast: TypeAlias = Callable[[], Sequence[PastResponse]]


def build_speculation(config: VllmEngineConfig) -> dict[str, Any]:
    """Return vLLM's arguments for speculative decoding."""
    match config.speculation:
        case "ngram":
            method: dict[str, Any] = {"method": "ngram"}
            method |= {"prompt_lookup_min": SHORTEST_NGRAM, "prompt_lookup_max": LONGEST_NGRAM}
        case "suffix":
            method = {"method": "custom_class", "model": PROPOSER}
        case _:
            return {}
    speculative = method | {"num_speculative_tokens": config.draft_tokens}
    return {"speculative_config": speculative, "per_request_spec_decode_metrics": "summary"}


def drafts_from_past(config: EngineConfig) -> bool:
    """Return whether engines of this config draft from past responses."""
    return isinstance(config, VllmEngineConfig) and config.speculation == "suffix"


class PastFeed:
    """Reads past responses in a thread and passes them to an engine, one read at a time.

    `read` returns past responses that it has not returned before, oldest first.
    """

    def __init__(self, read: ReadPast | None, remember: Callable[[Sequence[PastResponse]], Awaitable[None]]) -> None:
        """Create a feed, which does nothing if `read` is None."""
        self._read, self._remember = read, remember
        self._running: asyncio.Task[None] | None = None

    def refresh(self) -> None:
        """Begin to read new past responses, unless a read is running."""
        if self._read is not None and (self._running is None or self._running.done()):
            self._running = asyncio.create_task(self._pass_on(self._read))

    async def _pass_on(self, read: ReadPast) -> None:
        with suppress(EngineFailed):  # other calls of the engine report that the engine is dead
            await self._remember(await asyncio.to_thread(read))

    def close(self) -> None:
        """Stop passing on past responses."""
        if self._running is not None:
            self._running.cancel()
