"""Gives a run's environment access to the tokenizer, the chat template and the tools."""

from __future__ import annotations

from rollflow.tasks.environments.ports import EnvironmentPorts
from rollflow.tasks.environments.tools import build_toolbox
from rollflow.tasks.policies.renderer import PolicyRenderer
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.run.config import RunConfig


def build_ports(config: RunConfig, tokenizer: PolicyTokenizer) -> EnvironmentPorts:
    """Build the ports through which an environment of any kind uses the tokenizer, the chat template and the tools.

    Raises:
        ConfigError: a tool of the environment cannot be imported.
    """
    chat = {source.domain for source in config.prompts if source.chat}
    return EnvironmentPorts(tokenizer, PolicyRenderer(tokenizer, chat), build_toolbox(config.environment.tool_parts))
