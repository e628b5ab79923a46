"""Defines the base class of the configs of environments, and the configs of their tools and endpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, field_validator

from rollflow.tasks.runtime.sections import LONGEST_SECONDS, Imported, Section, refuse

EPISODES = {"kind": "the trajectories in the log are its episodes"}


class EnvironmentBase(Section):
    """Base class of the configs of all kinds of environment."""

    fixed: ClassVar[Mapping[str, str]] = EPISODES
    # True if an environment may replace the tokens of a prompt
    replaces_prompts: ClassVar[bool] = False
    # True if the environment itself rewards every episode, so that its prompts need no right answer
    has_reward: ClassVar[bool] = False

    @property
    def tool_parts(self) -> Mapping[str, ImportTool]:
        """The environment's tools, by name. Configs of environments with tools override `tool_parts`."""
        return {}

    @property
    def has_worker_processes(self) -> bool:
        """True if episodes run in worker processes, which environment actors may run."""
        return False

    @property
    def endpoint_roles(self) -> Mapping[str, EndpointRole]:
        """The endpoints of the environment, by name. An environment config with endpoints overrides this property."""
        return {}

    @property
    def shown_frames(self) -> int:
        """The largest number of frames (rendered states) of an episode on the run's page."""
        return 0

    @property
    def most_episodes(self) -> int | None:
        """The largest number of episodes that the environment plays at the same time; None if there is no limit."""
        return None


class ImportTool(Imported):
    """A tool that a user-defined environment can call for the policy."""

    seconds: float = Field(
        30.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds allowed for one call of the tool; a call that takes longer fails",
    )


class EndpointRole(Section):
    """A language model behind an OpenAI-compatible endpoint, which plays a role of a user-defined environment, such as
    a user."""

    fixed: ClassVar[Mapping[str, str]] = {"model": "earlier episodes were played with it"}

    url: str = Field(
        description="base address of the endpoint, e.g. http://127.0.0.1:8000/v1; a URL with a user, a password or a "
        "query is refused",
    )
    model: str = Field(min_length=1, description="name of the model, as the endpoint knows it")
    token_env: str = Field(
        "", description="name of the environment variable with the key of the endpoint; empty: no key is sent"
    )
    temperature: float = Field(1.0, ge=0, le=2, description="sampling temperature of the model")
    max_tokens: int = Field(512, gt=0, description="largest number of tokens in one answer of this model")
    extra_body: dict[str, Any] = Field(
        default_factory=dict, description="further fields of each request, for example of vLLM; no secrets"
    )
    tries: int = Field(
        4,
        gt=0,
        le=20,
        description="largest number of calls for one answer. A call is repeated after a lost connection, a time-out, "
        "or an HTTP status 408, 409, 429 or 5xx",
    )
    call_seconds: float = Field(60.0, gt=0, le=LONGEST_SECONDS, description="seconds allowed for one call")
    at_once: int = Field(32, gt=0, le=4096, description="largest number of calls to the endpoint at the same time")

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if not re.fullmatch(r"https?://[^@\s?#]+", url):
            cure = "give http:// or https://, a host and a path, without a user, a password or a query; name the "
            refuse(
                "environment.endpoints.url",
                url.rpartition("@")[2].partition("?")[0],
                f"{cure}key's variable in token_env",
            )
        return url
