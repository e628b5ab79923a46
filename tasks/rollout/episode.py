"""An episode under way: what its environment asks of it, and what has come of it.

Who holds the episode gives it three functions: how a generation is asked for, what is done when nothing more is to be
generated (and whether it is wanted then), and who judges it.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

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

    It is with its environment, or with who holds it: while something is asked of it. `let_go` ends the former.
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
    _leader: asyncio.Task[Any] | None = None  # what its environment runs in
    _asked: bool = False  # something, by its environment: an answer is under way
    _gone: bool = False  # it was let go
    _interrupted: bool = False  # while its environment thought

    @property
    def room(self) -> int:
        """See `Episode`."""
        return self.longest - len(self.response)

    async def generate(self) -> Generation | None:
        """See `Episode`."""
        if self.wanted is not None or self.room <= 0:
            return None
        with self._asking():
            if not self._gone:
                started = await self.ask(Turn(self.turns, self.prompt.tokens + self.response, self.room))
                if started is not None:
                    self._take(started)
                    if self.ending is not Ending.ABORTED and not self._gone:
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
        with self._asking():
            if not await self._close():
                return None
            return await self.score(ScoreRequest(tokens, self.prompt.reference))

    def let_go(self) -> None:
        """Nobody wants it any more: an environment that thinks is interrupted, one that has asked is told."""
        if self.wanted or self._gone:
            return
        self._gone = True
        if self._leader is not None and not self._asked:
            self._interrupted = True
            self._leader.cancel()

    async def played(self, environment: Environment) -> Score | None:
        """Its reward, once `environment` has led it to its end; None if it is not wanted."""
        score = await self._led(environment)
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

    async def _led(self, environment: Environment) -> Score | None:
        """What its environment says of it; None, too, if that was interrupted."""
        leader = self._leader = asyncio.current_task()
        assert leader is not None
        try:
            return await environment.play(self)
        except asyncio.CancelledError:
            if not self._interrupted or leader.cancelling() > 1:
                raise  # somebody ends the whole run
        finally:
            self._leader = None
            if self._interrupted:
                leader.uncancel()
        await self._abandon()
        return None

    @contextmanager
    def _asking(self) -> Iterator[None]:
        self._asked = True
        try:
            yield
        finally:
            self._asked = False

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
