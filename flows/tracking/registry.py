"""Marks the best version so far in MLflow's model registry by an alias on one of the model's versions.

A registered version names its run and the folder to which it was exported, and keeps its evaluation as tags.
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

# error codes for a missing model, and for a missing alias in MLflow's own store
NOT_THERE = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")


@dataclass(frozen=True, slots=True)
class EvaluationScore:
    """An evaluation: `accuracy` is the share of correct `responses`."""

    accuracy: float
    responses: int


@dataclass(frozen=True, slots=True)
class RegisteredVersion:
    """A registered version: its number, its run, its score."""

    number: str
    run_id: str
    score: EvaluationScore


def z_score(new: EvaluationScore, old: EvaluationScore) -> float:
    """Return the number of standard errors by which the accuracy of `new` is above that of `old`; 0 if the standard
    error is 0.

    z = (p1 - p0) / sqrt(p (1 - p) (1 / n1 + 1 / n0)), with p the share over both: the test of two proportions. The test
    assumes independent responses. Several samples of one prompt are not quite independent, so the true noise is larger.
    """
    total = new.responses + old.responses
    pooled = (new.accuracy * new.responses + old.accuracy * old.responses) / total
    error = math.sqrt(pooled * (1 - pooled) * (1 / new.responses + 1 / old.responses))
    return (new.accuracy - old.accuracy) / error if error else 0.0


class Registry:
    """The registered model of one recipe. Each call raises `Unreachable` if MLflow fails."""

    def __init__(self, uri: str, model: str, alias: str) -> None:
        self._uri, self._model, self._alias = uri, model, alias
        with self._translate_errors():
            self._client = MlflowClient(uri, uri)

    def best(self) -> RegisteredVersion | None:
        """Return the version that has the alias, or None if no version has the alias yet.

        Raises:
            ConfigError: a user gave the alias to a version of their own, which has no score.
        """
        with self._translate_errors():
            try:
                found = self._client.get_model_version_by_alias(self._model, self._alias)
            except MlflowException as error:
                if error.error_code not in NOT_THERE:
                    raise
                return None
        return self._read_version(found)

    def list_aliases(self) -> set[str]:
        """Return the runs of all versions that have an alias, including the user's own aliases."""
        with self._translate_errors():
            numbers = set(self._client.get_registered_model(self._model).aliases.values())
            return {self._client.get_model_version(self._model, str(one)).tags.get("run", "") for one in numbers}

    def add(self, folder: str, run_id: str, score: EvaluationScore) -> RegisteredVersion:
        """Register a version; leave a run that is already registered unchanged."""
        with self._translate_errors():
            try:
                self._client.create_registered_model(self._model)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            for version in self._versions_of(run_id):
                return RegisteredVersion(version.version, run_id, score)
            tags = {"run": run_id, "accuracy": repr(score.accuracy), "responses": str(score.responses)}
            created = self._client.create_model_version(self._model, folder, tags=tags)
            return RegisteredVersion(created.version, run_id, score)

    def forget(self, run_id: str) -> None:
        """Delete the registered versions of a run whose files are deleted."""
        with self._translate_errors():
            for version in self._versions_of(run_id):
                self._client.delete_model_version(self._model, version.version)

    def promote(self, version: RegisteredVersion) -> None:
        """Move the alias to this version."""
        with self._translate_errors():
            self._client.set_registered_model_alias(self._model, self._alias, version.number)

    def _versions_of(self, run_id: str) -> list[ModelVersion]:
        every = self._client.search_model_versions(f"name='{self._model}'")
        return [version for version in every if version.tags.get("run") == run_id]

    def _read_version(self, found: ModelVersion) -> RegisteredVersion:
        try:
            score = EvaluationScore(float(found.tags["accuracy"]), int(found.tags["responses"]))
            return RegisteredVersion(found.version, found.tags["run"], score)
        except (KeyError, ValueError):
            raise ConfigError(
                f"alias = {self._alias!r}: version {found.version} of MLflow's model {self._model!r} has this "
                "alias, but no night made that version; move the alias to a night's version, delete the alias, "
                "or name another alias in the nightly file"
            ) from None

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except MlflowException as error:
            said = str(error).partition("\n")[0][:200]
            raise Unreachable(f"MLflow's model registry at {redact(self._uri)}: {said}") from error
