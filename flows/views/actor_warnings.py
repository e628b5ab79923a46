"""The actors' warnings in the log of the run's own flow: each once, and without secrets.

A successor of an actor counts anew. Who takes over from a dead supervisor tells the newest again, on its own page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rollflow.flows.services.reachability import redact
from rollflow.flows.views.parameters import names_secret
from rollflow.tasks.runtime.actor_warnings import Warned

URL = re.compile(r"\b\w+://[^\s'\"]+")
NAMED = re.compile(r"([\w-]+)(['\"]?\s*[=:]\s*)(?:(?:Bearer|Basic)\s+)?([^\s,;]+)")


class ActorWarnings:
    """Tells those that were not told yet."""

    def __init__(self, warn: Callable[..., None]) -> None:
        """`warn`: a logger's method."""
        self._warn = warn
        self._told: dict[str, int] = {}  # process -> number of its newest warning that was told

    def tell(self, warned: Sequence[Warned]) -> None:
        """The new ones of these."""
        for one in warned:
            if one.number > self._told.get(one.process, 0):
                self._told[one.process] = one.number
                self._warn(
                    "%s warns: %s", one.actor, without_secrets(one.text), extra={"actor": one.actor, "rank": one.rank}
                )


def without_secrets(text: str) -> str:
    """A text without what stands behind the name of a secret, and without the user, password and query of addresses."""
    text = URL.sub(lambda found: redact(found[0]), text)
    return NAMED.sub(lambda found: f"{found[1]}{found[2]}***" if names_secret(found[1]) else found[0], text)
