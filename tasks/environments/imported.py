"""A user-defined environment: a class derived from `Environment`, created with the options in the config."""

from __future__ import annotations

from rollflow.storage.errors import RollflowError
from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.environments.config import ImportEnvironment
from rollflow.tasks.runtime.imports import imported_object
from rollflow.tasks.scorers.base import Score, failure_score, validate_score

KEY = "environment"


class ImportedEnvironment(Environment):
    """The environment that `environment.path` names. An error in the environment fails only one episode."""

    def __init__(self, config: ImportEnvironment) -> None:
        """Create the environment.

        Raises:
            ConfigError: there is no such class, the class breaks the contract, or the class takes other options.
        """
        self._own = imported_object(KEY, config, Environment)  # type: ignore[type-abstract]
        self._name = f"environment {config.path}"

    async def play(self, episode: Episode) -> Score | None:
        """Run an episode, as `Environment` says."""
        try:
            score = await self._own.play(episode)
        except RollflowError:  # an error of the run, such as a failed engine, not of the environment
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an environment may be foreign code
            return failure_score(self._name, error)
        return None if score is None else validate_score(self._name, score)
