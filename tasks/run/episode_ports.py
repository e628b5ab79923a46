"""Gives a run's environment access to the tokenizer, the chat template and the tools."""

from __future__ import annotations

from collections.abc import Iterable

from rollflow.tasks.environments.endpoints import EndpointRoles
from rollflow.tasks.environments.limits import NO_LIMITS
from rollflow.tasks.environments.limits_config import LimitedEnvironment
from rollflow.tasks.environments.ports import EnvironmentPorts
from rollflow.tasks.environments.tools import build_toolbox
from rollflow.tasks.policies.renderer import PolicyRenderer
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.prompts.config import FilePrompts
from rollflow.tasks.prompts.section import PromptBase
from rollflow.tasks.run.config import RunConfig


def build_ports(config: RunConfig, tokenizer: PolicyTokenizer) -> EnvironmentPorts:
    """Build the ports through which an environment of any kind uses the tokenizer, the chat template and the tools.

    Raises:
        ConfigError: a tool of the environment cannot be imported.
    """
    chat = {name for source in config.prompts if source.chat for name in (source.domain, *_list_sets(source))}
    limits = config.environment.limits if isinstance(config.environment, LimitedEnvironment) else NO_LIMITS
    toolbox = build_toolbox(config.environment.tool_parts)
    endpoints = EndpointRoles(config.environment.endpoint_roles)
    return EnvironmentPorts(tokenizer, PolicyRenderer(tokenizer, chat), toolbox, limits=limits, endpoints=endpoints)


def _list_sets(source: PromptBase) -> Iterable[str]:
    """Return the names of the evaluation sets of a source; each name is also the domain of the set's prompts."""
    return source.evaluation_sets if isinstance(source, FilePrompts) else ()
