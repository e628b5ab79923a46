"""Models of the request bodies of ROCK's protocol, which ignore unknown keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

# largest time limit of a command in seconds, and the default of requests without a limit
LONGEST_COMMAND = 3600.0


class RockRequest(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="ignore")


class StartRequest(RockRequest):
    image: str = Field(min_length=1)
    image_os: str = "linux"
    auto_clear_time: float | None = Field(None, ge=0, allow_inf_nan=False)
    auto_clear_time_minutes: float = Field(30.0, ge=0, allow_inf_nan=False)
    memory: str = "8g"
    cpus: float = Field(2.0, gt=0, allow_inf_nan=False)
    limit_cpus: float | None = Field(None, gt=0, allow_inf_nan=False)
    num_gpus: float | None = None
    sandbox_id: str | None = None
    disk: str | None = None


class SandboxRequest(RockRequest):
    sandbox_id: str = Field(min_length=1)


class ExecuteRequest(SandboxRequest):
    command: str | list[str]
    timeout: float | None = Field(1200.0, gt=0, allow_inf_nan=False)
    shell: bool = False
    check: bool = False
    error_msg: str = ""
    cwd: str | None = None
    env: dict[str, str] | None = None
    # An extension of ROCK's protocol: if false, background processes of the command are killed.
    keep_children: bool = True


class SessionRequest(SandboxRequest):
    session_type: str = "bash"
    session: str = "default"


class CreateSessionRequest(SessionRequest):
    startup_source: list[str] = Field(default_factory=list)
    startup_timeout: float = Field(10.0, gt=0, le=LONGEST_COMMAND)
    env: dict[str, str] | None = None
    remote_user: str | None = None


class RunRequest(SandboxRequest):
    command: str
    session: str = "default"
    timeout: float | None = Field(None, gt=0, allow_inf_nan=False)
    check: str = "raise"
    error_msg: str = ""
    is_interactive_command: bool = False
    is_interactive_quit: bool = False
    expect: list[str] = Field(default_factory=list)


class ReadRequest(SandboxRequest):
    path: str
    encoding: str | None = None
    errors: str | None = None


class WriteRequest(SandboxRequest):
    path: str
    content: str
