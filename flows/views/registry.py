"""The best version so far, as MLflow's model registry has it: an alias on one of a model's versions.

A registered version names the run and the folder it was exported to, and keeps its evaluation as tags.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from rollflow.flows.services.reachability import redact
from rollflow.storage.errors import ConfigError, Unreachable

NOT_THERE = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # a model; an alias, to MLflow's own store


@dataclass(frozen=True, slots=True)
class Score:
    """An evaluation: `accuracy` is the share of `responses` that were right."""

    accuracy: float
    responses: int


@dataclass(frozen=True, slots=True)
class Registered:
    """A registered version: its number, its run, its score."""

    number: str
    run_id: str
    score: Score


def z_score(new: Score, old: Score) -> float:
    """By how many standard errors `new` is better; 0 where neither can tell.

    z = (p1 - p0) / sqrt(p (1 - p) (1 / n1 + 1 / n0)), with p the share over both: the test of two proportions.
    It takes the responses for independent. Several samples of one prompt are not quite, and the true noise is larger.
    """
    total = new.responses + old.responses
    pooled = (new.accuracy * new.responses + old.accuracy * old.responses) / total
    error = math.sqrt(pooled * (1 - pooled) * (1 / new.responses + 1 / old.responses))
    return (new.accuracy - old.accuracy) / error if error else 0.0


class Registry:
    """The registered model of one recipe. Each call raises `Unreachable` where MLflow fails."""

    def __init__(self, uri: str, model: str, alias: str) -> None:
        self._uri, self._model, self._alias = uri, model, alias
        with self._answering():
            self._client = MlflowClient(uri, uri)

    def best(self) -> Registered | None:
        """The version that has the alias; None: there is none yet.

        Raises:
            ConfigError: a person gave it to a version of theirs, which has no score.
        """
        with self._answering():
            try:
                found = self._client.get_model_version_by_alias(self._model, self._alias)
            except MlflowException as error:
                if error.error_code not in NOT_THERE:
                    raise
                return None
        return self._registered(found)

    def aliased(self) -> set[str]:
        """The runs of all versions that have an alias, a person's, too."""
        with self._answering():
            numbers = set(self._client.get_registered_model(self._model).aliases.values())
            return {self._client.get_model_version(self._model, str(one)).tags.get("run", "") for one in numbers}

    def add(self, folder: str, run_id: str, score: Score) -> Registered:
        """Register a version; a run that is registered already stays as it is."""
        with self._answering():
            try:
                self._client.create_registered_model(self._model)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            for one in self._of_run(run_id):
                return Registered(one.version, run_id, score)
            tags = {"run": run_id, "accuracy": repr(score.accuracy), "responses": str(score.responses)}
            made = self._client.create_model_version(self._model, folder, tags=tags)
            return Registered(made.version, run_id, score)

    def forget(self, run_id: str) -> None:
        """Take away what a run registered; its files go."""
        with self._answering():
            for one in self._of_run(run_id):
                self._client.delete_model_version(self._model, one.version)

    def promote(self, version: Registered) -> None:
        """Give it the alias."""
        with self._answering():
            self._client.set_registered_model_alias(self._model, self._alias, version.number)

    def _of_run(self, run_id: str) -> list[ModelVersion]:
        every = self._client.search_model_versions(f"name='{self._model}'")
        return [one for one in every if one.tags.get("run") == run_id]

    def _registered(self, found: ModelVersion) -> Registered:
        try:
            score = Score(float(found.tags["accuracy"]), int(found.tags["responses"]))
            return Registered(found.version, found.tags["run"], score)
        except (KeyError, ValueError):
            raise ConfigError(
                f"alias = {self._alias!r}: version {found.version} of MLflow's model {self._model!r} has it, and no "
                "night made that: give the alias to one that a night made, or delete it, or name another in the file"
            ) from None

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except MlflowException as error:
            said = str(error).partition("\n")[0][:200]
            raise Unreachable(f"MLflow's model registry at {redact(self._uri)}: {said}") from error
