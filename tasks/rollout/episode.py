"""An episode under way: what its environment asks of it, and what has come of it.

Who holds the episode gives it three functions: how a generation is asked for, what is done when nothing more is to be
generated (and whether it is wanted then), and who judges it.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Ending, Prompt, Trajectory
from rollflow.tasks.engines.base import Generation
from rollflow.tasks.environments.base import Environment
from rollflow.tasks.rollout.proxy import Started
from rollflow.tasks.verifiers.base import Score
from rollflow.tasks.verifiers.pool import ScoreRequest

NO_REWARD = Score(0.0, "the episode ended without a reward")


@dataclass(frozen=True, slots=True)
class Turn:
    """A generation to ask for: which one of its episode (from 0), behind what, and of how many tokens at most."""

    number: int
    prompt: tuple[int, ...]
    max_new_tokens: int


@dataclass(eq=False, slots=True)
class PlayedEpisode:
    """`Episode`; T tokens of the response, with T log-probs, versions and mask.

    `ask` gives None where nothing is wanted any more. `closed` is told once, when nothing more is to be generated, and
    says whether it is wanted; never of an episode that had no generation because nothing was wanted.
    """

    prompt: Prompt
    longest: int  # tokens of a response
    ask: Callable[[Turn], Awaitable[Started | None]]
    closed: Callable[[PlayedEpisode], Awaitable[bool]]
    score: Callable[[ScoreRequest], Awaitable[Score]]
    response: tuple[int, ...] = ()
    mask: tuple[bool, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    turns: int = 0
    generated: int = 0  # tokens, of the policy
    first: Started | None = None
    ending: Ending = Ending.STOP
    began: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    at: float = 0.0  # when nothing more was to be generated
    wanted: bool | None = None  # known once that is so

    @property
    def room(self) -> int:
        """See `Episode`."""
        return self.longest - len(self.response)

    async def generate(self) -> Generation | None:
        """See `Episode`."""
        if self.wanted is not None or self.room <= 0:
            return None
        started = await self.ask(Turn(self.turns, self.prompt.tokens + self.response, self.room))
        if started is not None:
            self._take(started)
            if self.ending is not Ending.ABORTED:
                return started.generation
        await self._abandon()
        return None

    def add(self, tokens: Sequence[int]) -> None:
        """See `Episode`."""
        given = _checked(tokens)
        if len(given) > self.room:
            raise ValueError(f"{len(given)} tokens are more than the response has room for ({self.room})")
        self._append(given, (False,) * len(given), (0.0,) * len(given), (-1,) * len(given))

    async def judge(self, tokens: Sequence[int]) -> Score | None:
        """See `Episode`."""
        if not await self._close():
            return None
        return await self.score(ScoreRequest(tokens, self.prompt.reference))

    async def played(self, environment: Environment) -> Score | None:
        """Its reward, once `environment` has led it to its end; None if it is not wanted."""
        score = await environment.play(self)
        if not await self._close():
            return None
        return NO_REWARD if score is None else score

    def trajectory(self, sample: int, started_version: int, score: Score) -> Trajectory:
        """What is trained on."""
        given = len(self.prompt.tokens)
        return Trajectory(
            sample=sample,
            started_version=started_version,
            tokens=self.prompt.tokens + self.response,
            loss_mask=(False,) * given + self.mask,
            logprobs=(0.0,) * given + self.logprobs,
            versions=(-1,) * given + self.versions,
            reward=score.reward,
            reason=score.reason,
            ending=Ending(self.ending),
            generation_seconds=self.at - self.began,
            reward_seconds=asyncio.get_running_loop().time() - self.at,
        )

    def started_version(self, staleness: str) -> int:
        """The version its staleness counts from.

        Raises:
            ConfigError: nothing was generated.
        """
        if self.first is None:
            raise ConfigError("environment: it ended an episode without a generation; ask for one in each")
        if staleness == "oldest-token":
            return min((version for version in self.versions if version >= 0), default=self.first.version)
        return self.first.version

    def _take(self, started: Started) -> None:
        made = started.generation
        self._append(made.tokens, (True,) * len(made.tokens), made.logprobs, made.versions)
        self.first = self.first or started
        self.turns += 1
        self.generated += len(made.tokens)
        self.ending = made.ending

    def _append(
        self, tokens: tuple[int, ...], mask: tuple[bool, ...], logprobs: tuple[float, ...], versions: tuple[int, ...]
    ) -> None:
        self.response += tokens
        self.mask += mask
        self.logprobs += logprobs
        self.versions += versions

    async def _abandon(self) -> None:
        """It is over before its end; what was generated is counted, if anything was."""
        self.ending = Ending.ABORTED
        if self.turns:
            await self._close()
        else:
            self.wanted = False

    async def _close(self) -> bool:
        """Nothing more is to be generated; whether it is wanted."""
        if self.wanted is None:
            self.at = asyncio.get_running_loop().time()
            self.wanted = await self.closed(self)
        return self.wanted


def _checked(tokens: Sequence[int]) -> tuple[int, ...]:
    """Tokens that an environment gave, as engines take them; others would be an engine's end."""
    given = tuple(operator.index(token) for token in tokens)
    if given and min(given) < 0:
        raise ValueError(f"{min(given)} is no token")
    return given
