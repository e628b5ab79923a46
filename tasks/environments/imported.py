"""Imports a user-defined environment, which is a class derived from `Environment`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from rollflow.storage.errors import RollflowError
from rollflow.tasks.environments.base import Environment, Episode, LogProbs, SnapshotRejected
from rollflow.tasks.environments.config import ImportEnvironment
from rollflow.tasks.environments.ports import EnvironmentPorts
from rollflow.tasks.runtime.imports import imported_object
from rollflow.tasks.scorers.base import Score, Unjudged, check_number, failure_score, is_cancelled, validate_score
from rollflow.tasks.scorers.token_values import check_length

KEY = "environment"


class ImportedEnvironment(Environment):
    """Wraps the user-defined environment class that `environment.path` names.

    An error in the class fails only the current episode.
    """

    def __init__(self, config: ImportEnvironment) -> None:
        """Create the environment.

        Raises:
            ConfigError: the environment class does not exist, breaks the contract, or does not take the configured
            options.
        """
        self._own = imported_object(KEY, config, Environment, optional="measure")  # type: ignore[type-abstract]
        self._name = f"environment {config.path}"
        self.has_turns = self._own.has_turns

    async def play(self, episode: Episode) -> Score | None:
        """Run an episode; after an error in the user-defined environment, the score is 0."""
        try:
            score = await self._own.play(episode)
        except Unjudged as error:
            return failure_score(self._name, error)
        except SnapshotRejected as error:
            if episode.snapshot is not None:
                raise
            return failure_score(self._name, error)
        except RollflowError:  # errors of the run, such as a failed engine, are not errors of the environment
            raise
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            return failure_score(self._name, error)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an environment may be foreign code
            return failure_score(self._name, error)
        return None if score is None else self._check(score, episode)

    async def measure(self, logprobs: LogProbs, ports: EnvironmentPorts) -> Mapping[str, float]:
        """Return the measures of the user-defined environment, or no measures if it raises an error."""
        try:
            found = await self._own.measure(logprobs, ports)
            return {str(name): check_number(f"the measure {name!r}", value) for name, value in found.items()}
        except RollflowError:
            raise
        except Exception as error:  # noqa: BLE001 - an environment may be foreign code
            logging.getLogger(__name__).warning("an evaluation has no measures, as %s failed: %s", self._name, error)
            return {}

    def _check(self, score: object, episode: Episode) -> Score:
        """Return the score of an episode; an invalid score becomes the score of a failed episode."""
        valid = validate_score(self._name, score)
        try:
            check_length(valid, len(episode.response))
        except ValueError as error:
            return failure_score(self._name, error)
        return valid
