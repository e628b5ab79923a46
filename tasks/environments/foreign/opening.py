"""Adds tools and a first observation to the prompt of an episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollflow.storage.records import Outcome
from rollflow.tasks.environments.base import Episode
from rollflow.tasks.environments.foreign.faults import WorldEnded
from rollflow.tasks.environments.long_text import compute_apart
from rollflow.tasks.scorers.base import make_storable


async def open_prompt(episode: Episode, tools: Sequence[Mapping[str, Any]], text: str) -> None:
    """Add the tools and the first observation to the prompt.

    Raises:
        WorldEnded: the prompt leaves no room for a response.
    """
    if tools or text:
        texts = (text, *map(str, tools))
        render = episode.ports.renderer.render_opening
        tokens = await compute_apart(texts, render, episode.prompt, tools, make_storable(text, len(text)))
        try:
            episode.replace_prompt(tokens)
        except ValueError as error:
            why = f"tools and first observation leave no room for a response ({error}); raise engine.max_new_tokens"
            raise WorldEnded(Outcome.UNJUDGED, why) from None
