"""Checks, before a run begins, that the user-defined classes and functions in its config can be imported and built."""

from __future__ import annotations

from collections.abc import Mapping

from rollflow.storage.errors import ConfigError
from rollflow.tasks.environments import build_environment
from rollflow.tasks.environments.config import ImportEnvironment, ToolsEnvironment, split_environments
from rollflow.tasks.environments.foreign.check import check_environment
from rollflow.tasks.environments.foreign.config import ForeignEnvironment
from rollflow.tasks.environments.foreign.sources import hash_sources
from rollflow.tasks.environments.tool_use.check import check_tools
from rollflow.tasks.environments.tools import build_toolbox
from rollflow.tasks.objectives import build_objective
from rollflow.tasks.objectives.config import ImportObjective
from rollflow.tasks.prompts.config import ImportPrompts
from rollflow.tasks.prompts.run_prompts import RunPrompts
from rollflow.tasks.prompts.tables import read_file
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.imports import code_of
from rollflow.tasks.runtime.sections import Imported
from rollflow.tasks.scorers import build_verifier
from rollflow.tasks.scorers.config import ImportReward, split_scorers


def check_own_parts(config: RunConfig) -> None:
    """Import and build the user-defined parts of a config.

    Raises:
        ConfigError: a user-defined part cannot be imported or built; the message says what the user must change.
    """
    for section, reward in split_scorers({"": config.reward, **config.rewards}).items():
        if isinstance(reward, ImportReward):
            build_verifier(reward, section)
    if isinstance(config.train.objective, ImportObjective):
        build_objective(config.train.objective)
    if isinstance(config.environment, ImportEnvironment):
        build_environment(config.environment)
    for environment in split_environments(config.environment).values():
        if isinstance(environment, ForeignEnvironment):
            check_environment(environment)
        if isinstance(environment, ToolsEnvironment):
            check_tools(environment)
    build_toolbox(config.environment.tool_parts)
    for source in config.prompts:
        if isinstance(source, ImportPrompts):
            _check_source(source, config)


def own_code(config: RunConfig) -> dict[str, str]:
    """Map the config section of each user-defined part to the SHA-256 of the part's source file.

    Modules that the source file imports are not part of the hash. An environment in worker processes is not imported,
    and is left out if its file is not found.
    """
    sections = {"train.objective": config.train.objective, "environment": config.environment}
    sources = {f"prompts.{number}": source for number, source in enumerate(config.prompts)}
    named = {f"environment.tools.{name}": tool for name, tool in config.environment.tool_parts.items()}
    parts = {**split_scorers({"": config.reward, **config.rewards}), **sections, **sources, **named}
    found = {key: code_of(key, part) for key, part in parts.items() if isinstance(part, Imported)}
    for key, environment in split_environments(config.environment).items():
        if isinstance(environment, ForeignEnvironment) and (code := hash_sources(environment)):
            found[key] = code
    return found


def changed_code(config: RunConfig, before: Mapping[str, str]) -> list[str]:
    """List the config sections whose user-defined code has changed since `own_code` returned `before`."""
    return [key for key, found in own_code(config).items() if before.get(key, found) != found]


def describe_changed_code(config: RunConfig, before: Mapping[str, str]) -> list[str]:
    """Return a sentence for each user-defined part whose code has changed since `own_code` returned `before`. If the
    code cannot be compared, return the reason.
    """
    try:
        return [f"{key}.path: the file has changed since the run's start" for key in changed_code(config, before)]
    except ConfigError as error:
        return [f"the code of user-defined parts is not compared, because {error}"]


def _check_source(source: ImportPrompts, config: RunConfig) -> None:
    """Check that a user-defined prompt source asks the same questions each time it is opened."""

    def asked() -> str:
        return RunPrompts([source], config.seed, config.evaluation.prompts, None, 0, read_file).sha256(0)

    if asked() != asked():
        why = "the source asks other questions each time it is opened; draw from its seed alone"
        raise ConfigError(f"prompts.path = {source.path!r}: {why}")
