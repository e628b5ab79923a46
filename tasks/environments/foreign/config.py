"""Defines the config sections of environments that run in worker processes, in a Python interpreter of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rollflow.tasks.environments.base_config import EPISODES, EnvironmentBase
from rollflow.tasks.environments.limits_config import LimitedEnvironment, ParallelEnvironment
from rollflow.tasks.runtime.sections import IMPORT_PATH, LONGEST_SECONDS, refuse

FIXED = {
    **EPISODES,
    "path": "the trajectories in the log are episodes of this class",
    "id": "the trajectories in the log are episodes of this environment",
}


class ForeignEnvironment(ParallelEnvironment, LimitedEnvironment, EnvironmentBase):
    """Base class of the configs of environments that run in worker processes."""

    fixed: ClassVar[Mapping[str, str]] = FIXED
    replaces_prompts: ClassVar[bool] = True

    options: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments with which the environment is created"
    )
    interpreter: str = Field(
        "",
        description="path of the Python interpreter, 3.9 or newer, that runs the environment, e.g. that of a virtual "
        "environment; default: the interpreter of rollflow",
    )
    folder: str = Field(
        "", description="absolute path of the folder in which Python looks first for the environment's module"
    )
    max_turns: int = Field(20, gt=0, description="largest number of turns of an episode")
    start_seconds: float = Field(
        120.0, gt=0, le=LONGEST_SECONDS, description="seconds allowed for the import of the environment"
    )
    setup_seconds: float = Field(
        60.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds allowed for the creation and reset of an environment; after that its process is killed",
    )
    turn_seconds: float = Field(
        30.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds allowed for the step or the tool calls of one turn, and for the reward; after that the "
        "process is killed, and the episode is scored on what was reached",
    )
    close_seconds: float = Field(
        5.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds allowed for closing an environment; after that its process is killed",
    )
    episode_seconds: float = Field(
        600.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds for which the environment may compute in an episode, setup included; after that the "
        "process is killed, and the episode is scored on what was reached; the time begins anew after a crash",
    )

    @model_validator(mode="after")
    def _check_paths(self) -> Self:
        for key in ("interpreter", "folder"):
            value = getattr(self, key)
            if value and not Path(value).is_absolute():
                refuse(key, value, "the processes of a run have other working folders; write an absolute path")
        return self

    @property
    def part(self) -> str:
        """The key and the value that name the user's environment."""
        raise NotImplementedError

    @property
    def spec(self) -> Mapping[str, Any]:
        """The values that a worker process needs to create the environment."""
        return self.model_dump(mode="json", include={"kind", "path", "id", "options", "folder", *self.hooks})

    hooks: ClassVar[tuple[str, ...]] = ()  # further keys that a worker process reads


class TrlEnvironment(ForeignEnvironment):
    """An environment class that TRL's `environment_factory` takes."""

    kind: Literal["trl"] = Field(
        "trl", description="environment class that TRL's environment_factory takes, whose public methods are tools"
    )
    path: str = Field(pattern=IMPORT_PATH, description="import path of the class, e.g. my_package.games:Wordle")

    @property
    def part(self) -> str:
        """The key `path` and its value."""
        return f"path = {self.path!r}"


class GymnasiumEnvironment(ForeignEnvironment):
    """An environment of gymnasium, or a class with gymnasium's signature."""

    hooks: ClassVar[tuple[str, ...]] = ("observe", "act", "actions")

    kind: Literal["gymnasium"] = Field(
        "gymnasium", description="environment of gymnasium, or a class with gymnasium's signature"
    )
    id: str | None = Field(None, min_length=1, description="id for gymnasium.make, e.g. FrozenLake-v1")
    path: str | None = Field(
        None, pattern=IMPORT_PATH, description="import path of a class with gymnasium's signature, in place of an id"
    )
    actions: dict[str, Any] = Field(
        default_factory=dict,
        description="actions by the word with which the policy names the action, e.g. {left = 0, right = 2}; default: "
        "the numbers of a discrete action space",
    )
    act: str | None = Field(
        None,
        pattern=IMPORT_PATH,
        description="import path of a function that turns the policy's text into an action, and raises an error for "
        "a text that is not an action; in place of actions",
    )
    observe: str | None = Field(
        None,
        pattern=IMPORT_PATH,
        description="import path of a function that turns an observation and its info into text; default: the text "
        "of render_mode ansi, or else the observation as text",
    )

    rewards: Literal["episode", "turns"] = Field(
        "episode",
        description="whether the rewards of the steps are added to the score of the episode, or each is the reward of "
        "its turn, so that the objective knows which turn earned it",
    )

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if (self.id is None) == (self.path is None):
            refuse("id", self.id, "set either id or path, to say which environment")
        if self.actions and self.act:
            refuse("act", self.act, "the key actions says already what a text means; remove one of them")
        return self

    @property
    def part(self) -> str:
        """The key `id` or `path`, and its value."""
        return f"id = {self.id!r}" if self.id else f"path = {self.path!r}"
