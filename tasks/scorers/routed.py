"""A scorer that forwards each response to the scorer that the response's prompt names.

    requests --by name--> [reward]         its own queue, workers and deadline
                    `---> [rewards.math]   its own queue, workers and deadline

No scorer waits for another one: a response that is slow to score delays only responses with the same scorer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rollflow.storage.errors import ConfigError
from rollflow.tasks.scorers.base import Score, ScoreRequest
from rollflow.tasks.scorers.config import name_section
from rollflow.tasks.scorers.several import SeveralScorers


class RoutedScorer(SeveralScorers):
    """Several scorers by name. See the module's docstring."""

    def submit(self, requests: Sequence[ScoreRequest]) -> list[asyncio.Future[Score]]:
        """Begin to score these responses, each with the scorer that its request names.

        Raises:
            ConfigError: a request names a scorer that the run does not have.
        """
        if unknown := {request.scorer for request in requests} - self.scorers.keys():
            section = name_section(unknown.pop())
            raise ConfigError(f"{section}: a prompt names this scorer, and the run has no such scorer; add the section")
        places: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            places.setdefault(request.scorer, []).append(place)
        found: dict[int, asyncio.Future[Score]] = {}
        for name, of_name in places.items():
            futures = self.scorers[name].submit([requests[place] for place in of_name])
            found |= zip(of_name, futures, strict=True)
        return [found[place] for place in range(len(requests))]
