"""Defines the config sections of environments that run in worker processes, possibly with another Python
interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rollflow.tasks.environments.base_config import EPISODES, EnvironmentBase
from rollflow.tasks.environments.limits_config import MOST_EPISODES, LimitedEnvironment, ParallelEnvironment
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
        description="path of the Python interpreter, 3.9 or newer, that runs the environment, e.g. of a virtual "
        "environment; default: the interpreter of rollflow",
    )
    folder: str = Field(
        "", description="absolute path of the folder in which Python looks first for the environment's module"
    )
    max_turns: int = Field(20, gt=0, description="largest number of turns of an episode")
    resets_ahead: int = Field(
        0,
        ge=0,
        le=MOST_EPISODES,
        description="largest number of episodes for which the environment is reset before the episodes start. Each of "
        "these resets takes one of the at_once places, until an episode needs the place",
    )
    start_seconds: float = Field(
        120.0, gt=0, le=LONGEST_SECONDS, description="seconds allowed for the import of the environment"
    )
    setup_seconds: float = Field(
        60.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds allowed for the creation and reset of an environment; if they take longer, the "
        "environment's process is killed",
    )
    turn_seconds: float = Field(
        30.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds allowed for the step or the tool calls of one turn, and for the reward; if they take "
        "longer, the process is killed, and the episode keeps the reward that it has earned so far",
    )
    close_seconds: float = Field(
        5.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds allowed for closing an environment; if closing takes longer, the environment's process is "
        "killed",
    )
    episode_seconds: float = Field(
        600.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds for which the environment may compute in an episode, setup included; then the process is "
        "killed, and the episode keeps the reward that it has earned so far; after a crash of the run, the time is "
        "counted from 0 again",
    )

    page_frames: int = Field(
        0,
        ge=0,
        le=100,
        description="largest number of frames (rendered states) of an episode on the run's page; for the frames, the "
        "environment repeats the actions of two episodes when the page is written",
    )

    @property
    def shown_frames(self) -> int:
        """The largest number of frames (rendered states) of an episode on the run's page."""
        return self.page_frames

    @model_validator(mode="after")
    def _check_paths(self) -> Self:
        for key in ("interpreter", "folder"):
            value = getattr(self, key)
            if value and not Path(value).is_absolute():
                refuse(
                    key,
                    value,
                    "must be an absolute path, because the processes of a run have other working folders; write "
                    "an absolute path",
                )
        return self

    @property
    def has_worker_processes(self) -> bool:
        """True: each episode has a worker process."""
        return True

    @property
    def part(self) -> str:
        """The config key that names the user's environment, and its value."""
        raise NotImplementedError

    @property
    def spec(self) -> Mapping[str, Any]:
        """The values that a worker process needs to create the environment."""
        return self.model_dump(mode="json", include={"kind", "path", "id", "options", "folder", *self.hooks})

    hooks: ClassVar[tuple[str, ...]] = ()  # further keys that a worker process reads


class TrlEnvironment(ForeignEnvironment):
    """An environment class that follows the contract of TRL's `environment_factory`."""

    kind: Literal["trl"] = Field(
        "trl",
        description="environment class written for TRL's environment_factory; the public methods of the class are "
        "tools",
    )
    path: str = Field(pattern=IMPORT_PATH, description="import path of the class, e.g. my_package.games:Wordle")

    @property
    def part(self) -> str:
        """The key `path` and its value."""
        return f"path = {self.path!r}"


class GymnasiumEnvironment(ForeignEnvironment):
    """An environment of the library gymnasium, or a class with the methods of a gymnasium environment."""

    hooks: ClassVar[tuple[str, ...]] = ("observe", "act", "actions")
    has_reward: ClassVar[bool] = True

    kind: Literal["gymnasium"] = Field(
        "gymnasium",
        description="environment of the library gymnasium, or a class with the methods of a gymnasium environment",
    )
    id: str | None = Field(None, min_length=1, description="id for gymnasium.make, e.g. FrozenLake-v1")
    path: str | None = Field(
        None,
        pattern=IMPORT_PATH,
        description="import path of a class with the methods of a gymnasium environment; use either path or id",
    )
    actions: dict[str, Any] = Field(
        default_factory=dict,
        description="for each word that the policy may write, the action that the word means, e.g. {left = 0, right = "
        "2}; default: the policy writes the number of an action",
    )
    act: str | None = Field(
        None,
        pattern=IMPORT_PATH,
        description="import path of a function that turns the policy's text into an action, and raises an error if the "
        "text is not an action; use either act or actions",
    )
    observe: str | None = Field(
        None,
        pattern=IMPORT_PATH,
        description="import path of a function that turns an observation and its info into text; default: the text "
        "that the environment renders (render_mode ansi), or the observation as text",
    )

    rewards: Literal["episode", "turns"] = Field(
        "episode",
        description="what the reward of a step is added to. episode: the score of the episode; turns: the turn of the "
        "step, so that the objective can use the reward of each turn",
    )

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if (self.id is None) == (self.path is None):
            refuse("id", self.id, "exactly one of id and path must be set, to say which environment is played")
        if self.actions and self.act:
            refuse(
                "act", self.act, "the key actions says already which action a text means; remove one of the two keys"
            )
        return self

    @property
    def part(self) -> str:
        """The config key that names the environment (`id` or `path`), and its value."""
        return f"id = {self.id!r}" if self.id else f"path = {self.path!r}"
