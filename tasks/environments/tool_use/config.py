"""Defines the config section of the environment `tools`, in which the policy calls tools before it answers."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rollflow.tasks.environments.base_config import EnvironmentBase
from rollflow.tasks.environments.limits_config import LimitedEnvironment, ParallelEnvironment
from rollflow.tasks.runtime.sections import LONGEST_SECONDS, SECRET_NAME, Section, refuse
from rollflow.tasks.sandboxes.config import BubblewrapSandbox, RunCodeSandbox, SandboxConfig

LEAST_CHARACTERS = 64  # smallest limit that leaves room for the note that a result was shortened


class PythonTool(Section):
    """The tool `python`: a Python session in a sandbox, which keeps its variables between calls."""

    sandbox: SandboxConfig = BubblewrapSandbox()
    seconds: float = Field(
        10.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds allowed for one call of the tool python; code that runs longer is interrupted, and the "
        "policy reads the reason",
    )

    @model_validator(mode="after")
    def _check_sessions(self) -> Self:
        if isinstance(self.sandbox, RunCodeSandbox):
            cure = "a server of this kind has no sessions, which the tool python needs; choose another kind"
            refuse("environment.python.sandbox.kind", self.sandbox.kind, cure)
        return self


class McpServer(Section):
    """An MCP server whose tools the policy may call. Each episode starts its own process of the MCP server."""

    command: tuple[str, ...] = Field(
        min_length=1,
        description='program and arguments that start the server, e.g. ["/opt/shop/bin/python", "-m", "shop.server"]; '
        "the server must speak MCP over its standard input and output",
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        description="additional environment variables of an MCP server; from the run, the server inherits only PATH, "
        "HOME and a few others",
    )
    pass_env: tuple[str, ...] = Field(
        (),
        description="names of further environment variables that an MCP server inherits from the run, e.g. a variable "
        "with an access token",
    )
    folder: str = Field(
        "", description="absolute path of the working folder of an MCP server; default: the working folder of the run"
    )
    prefix: str = Field(
        "",
        description="text that is put before the names of an MCP server's tools, so that no two tools have the same "
        "name",
    )
    start_seconds: float = Field(
        60.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds allowed for the start of an MCP server and the list of its tools; a slower server is "
        "killed",
    )
    seconds: float = Field(
        30.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds allowed for one call of an MCP server's tool; after a longer call, the server is killed "
        "and the episode ends",
    )


class ToolsEnvironment(ParallelEnvironment, LimitedEnvironment, EnvironmentBase):
    """An environment in which the policy answers a question with the help of tools."""

    replaces_prompts: ClassVar[bool] = True  # the chat template adds the tools to the prompt

    kind: Literal["tools"] = Field(
        "tools", description="environment in which the policy calls tools, and the run's scorer scores its last answer"
    )
    python: PythonTool | None = Field(
        None,
        description="tool that runs Python code in a sandbox; an empty table selects the tool with its default "
        "settings; default: the policy has no Python tool",
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

    @property
    def has_worker_processes(self) -> bool:
        """True if the environment has MCP servers, which run in worker processes."""
        return bool(self.mcp)

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        if self.python is None and not self.mcp:
            cure = "the policy has no tool; add the section [environment.python] or [environment.mcp.NAME]"
            refuse("environment.kind", self.kind, cure)
        for name, server in self.mcp.items():
            _check_server(f"environment.mcp.{name}", server)
        return self


def _check_server(key: str, server: McpServer) -> None:
    """Reject relative paths, and also secrets, because they would be stored with the config."""
    for name, path in (("command", server.command[0]), ("folder", server.folder)):
        if path and (name == "folder" or "/" in path) and not Path(path).is_absolute():
            refuse(
                f"{key}.{name}",
                path,
                "must be an absolute path, because the processes of a run have other working folders; write an "
                "absolute path",
            )
    for name in server.env:
        if SECRET_NAME.search(name):
            cure = f"this secret would be stored; set the variable on the nodes, and name it in {key}.pass_env"
            refuse(f"{key}.env.{name}", "...", cure)
