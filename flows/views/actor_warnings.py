"""Logs the warnings of a run's Ray actors in the log of the supervising Prefect flow run. Each warning is logged once,
and without secrets. A restarted flow run logs the newest warnings again.
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
    """Logs each warning of a Ray actor that was not logged before."""

    def __init__(self, warn: Callable[..., None]) -> None:
        """Log warnings by calling `warn`, a method of a logger such as `Logger.warning`."""
        self._warn = warn
        self._logged: dict[str, int] = {}  # Maps each process that warned to the number of its newest logged warning.

    def tell(self, warned: Sequence[ActorWarning]) -> None:
        """Log the actors' warnings that were not logged before."""
        for warning in warned:
            if warning.number > self._logged.get(warning.process, 0):
                self._logged[warning.process] = warning.number
                facts = {"actor": warning.actor, "rank": warning.rank}
                self._warn("%s warns: %s", warning.actor, without_secrets(warning.text), extra=facts)


def without_secrets(text: str) -> str:
    """Return a copy of the text without secrets. User names, passwords and queries are removed from addresses in the
    text, too.
    """
    text = URL.sub(lambda found: redact(found[0]), text)
    return NAMED.sub(lambda found: f"{found[1]}{found[2]}***" if names_secret(found[1]) else found[0], text)
