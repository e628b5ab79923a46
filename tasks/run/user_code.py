"""Whether the parts that a recipe imports are there: looked at before a run begins."""

from __future__ import annotations

from collections.abc import Mapping

from rollflow.storage.errors import ConfigError
from rollflow.tasks.environments import build_environment
from rollflow.tasks.environments.config import ImportEnvironment
from rollflow.tasks.objectives import build_objective
from rollflow.tasks.objectives.config import ImportObjective
from rollflow.tasks.prompts.config import ImportPrompts
from rollflow.tasks.prompts.jsonl import read_file
from rollflow.tasks.prompts.run_prompts import RunPrompts
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.imports import code_of
from rollflow.tasks.runtime.sections import Imported
from rollflow.tasks.verifiers import build_verifier
from rollflow.tasks.verifiers.config import ImportReward


def check_own_parts(config: RunConfig) -> None:
    """Import them, and build what is built of them. Parts that come with rollflow are left alone: they are there.

    Raises:
        ConfigError: with one sentence for the first thing a person must change.
    """
    if isinstance(config.reward, ImportReward):
        build_verifier(config.reward)
    if isinstance(config.train.objective, ImportObjective):
        build_objective(config.train.objective)
    if isinstance(config.environment, ImportEnvironment):
        build_environment(config.environment)
    for source in config.prompts:
        if isinstance(source, ImportPrompts):
            _check_source(source, config)


def own_code(config: RunConfig) -> dict[str, str]:
    """Section of each part of a person's own -> SHA-256 of the file it is written in, not of what that imports."""
    sections = {"reward": config.reward, "train.objective": config.train.objective, "environment": config.environment}
    sources = {f"prompts.{number}": source for number, source in enumerate(config.prompts)}
    return {key: code_of(key, part) for key, part in {**sections, **sources}.items() if isinstance(part, Imported)}


def changed_code(config: RunConfig, before: Mapping[str, str]) -> list[str]:
    """The sections whose own part was written otherwise when `own_code` gave `before`."""
    return [key for key, found in own_code(config).items() if before.get(key, found) != found]


def _check_source(source: ImportPrompts, config: RunConfig) -> None:
    """It asks something, and the same when it is opened again: a run's processes each have one of their own."""

    def asked() -> str:
        return RunPrompts([source], config.seed, config.evaluation.prompts, None, 0, read_file).sha256(0)

    if asked() != asked():
        why = "it asks other questions each time it is opened; draw from its seed alone"
        raise ConfigError(f"prompts.path = {source.path!r}: {why}")
