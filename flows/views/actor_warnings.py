"""Logs the actors' warnings in the run's own flow: each warning once, and without secrets.

A restarted actor numbers its warnings from 1 again. A supervisor that takes over logs the newest warnings again, on its
own page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rollflow.flows.services.reachability import redact
from rollflow.flows.views.parameters import names_secret
from rollflow.tasks.runtime.actor_warnings import ActorWarning

URL = re.compile(r"\b\w+://[^\s'\"]+")
NAMED = re.compile(r"([\w-]+)(['\"]?\s*[=:]\s*)(?:(?:Bearer|Basic)\s+)?([^\s,;]+)")


class ActorWarnings:
    """Logs each warning that was not logged before."""

    def __init__(self, warn: Callable[..., None]) -> None:
        """Log through `warn`, a logger's method."""
        self._warn = warn
        self._logged: dict[str, int] = {}  # process -> number of its newest logged warning

    def tell(self, warned: Sequence[ActorWarning]) -> None:
        """Log those of these warnings that are new."""
        for warning in warned:
            if warning.number > self._logged.get(warning.process, 0):
                self._logged[warning.process] = warning.number
                facts = {"actor": warning.actor, "rank": warning.rank}
                self._warn("%s warns: %s", warning.actor, without_secrets(warning.text), extra=facts)


def without_secrets(text: str) -> str:
    """Return a text without the values of secrets, and without the user, password and query of addresses."""
    text = URL.sub(lambda found: redact(found[0]), text)
    return NAMED.sub(lambda found: f"{found[1]}{found[2]}***" if names_secret(found[1]) else found[0], text)
