"""Defines the config section of the environment `tools`, in which the policy calls tools before it answers."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rollflow.tasks.environments.base_config import EnvironmentBase
from rollflow.tasks.environments.limits_config import LimitedEnvironment, ParallelEnvironment
from rollflow.tasks.runtime.sections import LONGEST_SECONDS, SECRET_NAME, Section, refuse
from rollflow.tasks.sandboxes.config import BubblewrapSandbox, RunCodeSandbox, SandboxConfig

LEAST_CHARACTERS = 64  # a shortened result needs room for the sentence that says so


class PythonTool(Section):
    """The tool `python`: a Python session in a sandbox, whose variables are kept from call to call."""

    sandbox: SandboxConfig = BubblewrapSandbox()
    seconds: float = Field(
        10.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds allowed for one call of the tool python; after that the code is interrupted, and the "
        "policy reads why",
    )

    @model_validator(mode="after")
    def _check_sessions(self) -> Self:
        if isinstance(self.sandbox, RunCodeSandbox):
            cure = "a server of this kind has no sessions, which the tool python needs; choose another kind"
            refuse("environment.python.sandbox.kind", self.sandbox.kind, cure)
        return self


class McpServer(Section):
    """An MCP server, which each episode starts for itself, and whose tools the policy may call."""

    command: tuple[str, ...] = Field(
        min_length=1,
        description='program and arguments that start the server, e.g. ["/opt/shop/bin/python", "-m", "shop.server"]; '
        "the server must speak MCP over its standard input and output",
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="environment variables of an MCP server; it inherits only PATH, HOME and such"
    )
    pass_env: tuple[str, ...] = Field(
        (), description="names of the run's environment variables that an MCP server inherits, e.g. that of a token"
    )
    folder: str = Field("", description="absolute path of the working folder of an MCP server; default: the run's")
    prefix: str = Field(
        "", description="text before the names of an MCP server's tools, so that the names differ from those of others"
    )
    start_seconds: float = Field(
        60.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds allowed for the start of an MCP server and the list of its tools; after that it is killed",
    )
    seconds: float = Field(
        30.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds allowed for one call of an MCP server's tool; after that the server is killed, and the "
        "episode ends",
    )


class ToolsEnvironment(ParallelEnvironment, LimitedEnvironment, EnvironmentBase):
    """An environment in which the policy answers a question with the help of tools."""

    replaces_prompts: ClassVar[bool] = True  # a chat template writes the tools before the question

    kind: Literal["tools"] = Field(
        "tools", description="environment in which the policy calls tools, and the run's scorer scores its last answer"
    )
    python: PythonTool | None = Field(
        None, description="tool that runs Python code in a sandbox; an empty table takes all defaults; default: no tool"
    )
    mcp: dict[str, McpServer] = Field(
        default_factory=dict, description="MCP servers by name, whose tools the policy may call"
    )
    result_characters: int = Field(
        8000,
        ge=LEAST_CHARACTERS,
        description="largest number of characters of a tool's result that the policy reads; the middle of a longer "
        "result is left out",
    )

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        if self.python is None and not self.mcp:
            cure = "the policy has no tool; add the section [environment.python] or [environment.mcp.NAME]"
            refuse("environment.kind", self.kind, cure)
        for name, server in self.mcp.items():
            _check_server(f"environment.mcp.{name}", server)
        return self


def _check_server(key: str, server: McpServer) -> None:
    """Reject paths that depend on the working folder, and secrets, which would be stored with the config."""
    for name, path in (("command", server.command[0]), ("folder", server.folder)):
        if path and (name == "folder" or "/" in path) and not Path(path).is_absolute():
            refuse(f"{key}.{name}", path, "the processes of a run have other working folders; write an absolute path")
    for name in server.env:
        if SECRET_NAME.search(name):
            cure = f"this secret would be stored; set the variable on the nodes, and name it in {key}.pass_env"
            refuse(f"{key}.env.{name}", "...", cure)
