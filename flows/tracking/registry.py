"""Registers trained policies in MLflow's model registry, and marks the best policy of each recipe with an alias. The
source of a model version is the folder of its exported weights, and its tags name its training run and its evaluation.
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

# Error codes of MLflow for a missing model and for a missing alias.
NOT_THERE = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")


@dataclass(frozen=True, slots=True)
class EvaluationScore:
    """The result of an evaluation. `accuracy` is the share of correct responses among `responses`."""

    accuracy: float
    responses: int


@dataclass(frozen=True, slots=True)
class RegisteredVersion:
    """A model version in MLflow's model registry: its number, the id of its run, and its evaluation."""

    number: str
    run_id: str
    score: EvaluationScore


def z_score(new: EvaluationScore, old: EvaluationScore) -> float:
    """Return the z-score by which the accuracy of `new` exceeds that of `old`. Return a z-score of 0 if the standard
    error is 0.

    The two-proportion z-test gives z = (p1 - p0) / sqrt(p (1 - p) (1 / n1 + 1 / n0)), where p1 and p0 are the
    accuracies, n1 and n0 are the numbers of responses, and p is the accuracy over all responses. The z-test assumes
    that responses are independent. Responses to the same prompt are not quite independent, so the true standard error
    is larger.
    """
    total = new.responses + old.responses
    pooled = (new.accuracy * new.responses + old.accuracy * old.responses) / total
    error = math.sqrt(pooled * (1 - pooled) * (1 / new.responses + 1 / old.responses))
    return (new.accuracy - old.accuracy) / error if error else 0.0


class Registry:
    """The registered model of one recipe in MLflow's model registry. Each method of the registry raises `Unreachable`
    if MLflow fails.
    """

    def __init__(self, uri: str, model: str, alias: str) -> None:
        self._uri, self._model, self._alias = uri, model, alias
        with self._translate_errors():
            self._client = MlflowClient(uri, uri)

    def best(self) -> RegisteredVersion | None:
        """Return the registered model version that has the alias for the best policy, or None if there is none.

        Raises:
            ConfigError: a user gave the alias to another model version, which has no evaluation.
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
        """Return the run ids of all registered model versions that have an alias. Aliases of model versions that a user
        set count, too.
        """
        with self._translate_errors():
            numbers = set(self._client.get_registered_model(self._model).aliases.values())
            return {self._client.get_model_version(self._model, str(one)).tags.get("run", "") for one in numbers}

    def add(self, folder: str, run_id: str, score: EvaluationScore) -> RegisteredVersion:
        """Register the policy of a run as a model version. If the run is registered already, return its model
        version.
        """
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
        """Delete the registered model versions of a run whose files are being deleted."""
        with self._translate_errors():
            for version in self._versions_of(run_id):
                self._client.delete_model_version(self._model, version.version)

    def promote(self, version: RegisteredVersion) -> None:
        """Move the alias for the best policy to this model version."""
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
                "alias, but was not made by a nightly run; move or delete the alias, or name another one in the "
                "nightly file"
            ) from None

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except MlflowException as error:
            said = str(error).partition("\n")[0][:200]
            raise Unreachable(f"MLflow's model registry at {redact(self._uri)} cannot be used: {said}") from error
