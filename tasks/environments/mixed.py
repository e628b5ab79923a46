"""Plays the prompts of a run in several environments. A column of a prompt's row names the environment of the prompt.

An environment that fails too often (`max_failures`) is removed: it plays no more episodes, and the scheduler replaces
its prompts by other prompts. The removed environment is tried again when the run is resumed. The run fails once all
environments are removed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Outcome, Prompt
from rollflow.tasks.environments.base import (
    ChosenEnvironment,
    Environment,
    EnvironmentChoice,
    Episode,
    ResettingEnvironment,
)
from rollflow.tasks.environments.foreign.health import EnvironmentBroken
from rollflow.tasks.environments.limits import EpisodeLimits
from rollflow.tasks.scorers.base import Score

NO_NAMES: Mapping[str, str] = {}


@dataclass(frozen=True, eq=False)
class MixedMember(Environment):
    """One of several environments. `removals` maps the name of each removed environment to the reason."""

    name: str
    own: Environment
    limits: EpisodeLimits
    members: int  # number of all environments
    removals: dict[str, str]

    @property
    def keeps_deadlines(self) -> bool:  # type: ignore[override]
        """True if the environment itself enforces the limits on its computing time."""
        return self.own.keeps_deadlines

    async def play(self, episode: Episode) -> Score | float | None:
        """Run an episode; an episode of a removed environment is unjudged.

        Raises:
            EnvironmentBroken: all environments are removed.
        """
        if self.name not in self.removals:
            try:
                return await self.own.play(episode)
            except EnvironmentBroken as broken:
                self._remove(broken)
        return Score(0.0, self.removals[self.name], Outcome.UNJUDGED)

    def _remove(self, broken: EnvironmentBroken) -> None:
        if self.name in self.removals:
            return
        self.removals[self.name] = why = f"the environment {self.name!r} is removed: {broken}"
        if len(self.removals) == self.members:
            raise broken
        logging.getLogger(__name__).warning("%s; its prompts are left out until the run is resumed", why)


@dataclass(eq=False)
class MixedEpisodes(EnvironmentChoice, ResettingEnvironment):
    """Several environments by name. See the module's docstring."""

    column: str
    default: str | None
    own: Mapping[str, Environment]
    limits: Mapping[str, EpisodeLimits]
    removals: dict[str, str] = field(default_factory=dict)

    def choose(self, prompt: Prompt) -> ChosenEnvironment:
        """Return the environment that the prompt's row names.

        Raises:
            ConfigError: there is no environment of this name.
        """
        name = prompt.reference.get(self.column, self.default)
        if not isinstance(name, str) or name not in self.own:
            raise ConfigError(explain_name(self.column, name, self.own))
        limits = self.limits[name]
        member = MixedMember(name, self.own[name], limits, len(self.own), self.removals)
        return ChosenEnvironment(member, limits, self.removals.get(name, ""))

    @property
    def resets_ahead(self) -> int:
        """Largest number of episodes for which environments are reset before the episodes start."""
        return sum(one.resets_ahead for _, one in self._list_resetting())

    def reset_ahead(self, prompts: Sequence[Prompt], issued: Sequence[Prompt] = ()) -> None:
        """Let each environment that is not removed reset ahead for those of the next episodes that it plays."""
        names = [prompt.reference.get(self.column, self.default) for prompt in prompts]
        for name, one in self._list_resetting():
            kept = () if name in self.removals else zip(names, prompts, strict=True)
            one.reset_ahead([prompt for chosen, prompt in kept if chosen == name], issued)

    def _list_resetting(self) -> list[tuple[str, ResettingEnvironment]]:
        return [(name, one) for name, one in self.own.items() if isinstance(one, ResettingEnvironment)]

    async def play(self, episode: Episode) -> Score | float | None:
        """Run an episode in the environment that the prompt's row names."""
        return await self.choose(episode.prompt).environment.play(episode)


def explain_name(column: str, name: object, known: Iterable[str]) -> str:
    """Return the error message for a row whose column names no environment, with what the user can do."""
    names = ", ".join(known)
    cure = f"add [environment.kinds.{name}], or name one of: {names}" if name else f"name one of: {names}"
    return f"environment.column = {column!r}: a prompt's row has {name!r} there, which is no environment; {cure}"
