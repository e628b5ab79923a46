"""An episode under way: what its environment asks of it, and what has come of it.

Who holds the episode gives it three functions: how a generation is asked for, what is done when nothing more is to be
generated (and whether it is wanted then), and who judges it.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Ending, Prompt, Trajectory
from rollflow.storage.token_arrays import ANY_TOKEN, Bools, Float32s, Int32s
from rollflow.tasks.engines.base import Generation, Partial
from rollflow.tasks.environments.base import Environment
from rollflow.tasks.rollout.proxy import Started
from rollflow.tasks.verifiers.base import Score
from rollflow.tasks.verifiers.pool import ScoreRequest

NO_REWARD = Score(0.0, "the episode ended without a reward")
NOTHING = Partial()
CHOSEN = b"\1"


@dataclass(frozen=True, slots=True)
class Turn:
    """A generation to ask for: which one of its episode (from 0), behind what, and of how many tokens at most."""

    number: int
    prompt: Int32s
    max_new_tokens: int


@dataclass(eq=False, slots=True)
class PlayedEpisode:
    """`Episode`; T tokens of the response so far, and a mask of as many. Nobody looks at a token here: they are flat.

    `ask` gives None where nothing is wanted any more. `closed` is told once, when nothing more is to be generated, and
    says whether it is wanted; also of an episode that had no generation because nothing was wanted.

    It is with its environment, or with who holds it: while something is asked of it. `let_go` ends the former.
    """

    prompt: Prompt
    longest: int  # tokens of a response
    ask: Callable[[Turn], Awaitable[Started | None]]
    closed: Callable[[PlayedEpisode], Awaitable[bool]]
    score: Callable[[ScoreRequest], Awaitable[Score]]
    vocabulary: int = ANY_TOKEN  # tokens that the policy has
    made: Partial = NOTHING
    mask: bytes = b""  # a byte for each token: 1, or 0 where it was added
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
    def response(self) -> Int32s:
        """See `Episode`."""
        return self.made.tokens

    @property
    def room(self) -> int:
        """See `Episode`."""
        return self.longest - len(self.made)

    async def generate(self) -> Generation | None:
        """See `Episode`."""
        if self.wanted is not None or self.room <= 0:
            return None
        self._asked = True
        try:
            started = None if self._gone else await self.ask(self._turn())
            if started is not None:
                self._take(started)
                if self.ending is not Ending.ABORTED and not self._gone:
                    return started.generation
            await self.abandon()
        finally:
            self._asked = False
        return None

    def add(self, tokens: Sequence[int]) -> None:
        """See `Episode`."""
        given = self._checked(tokens)
        count = len(given)
        if count > self.room:
            raise ValueError(f"{count} tokens are more than the response has room for ({self.room})")
        added = Partial(given, Float32s.same(0.0, count), Int32s.same(-1, count))
        self.made, self.mask = self.made + added, self.mask + bytes(count)

    async def judge(self, tokens: Sequence[int]) -> Score | None:
        """See `Episode`."""
        self._asked = True
        try:
            if not await self._close():
                return None
            return await self.score(ScoreRequest(self._checked(tokens), self.prompt.reference))
        finally:
            self._asked = False

    def let_go(self) -> None:
        """Nobody wants it any more: an environment that thinks is interrupted, one that has asked is told."""
        if self.wanted or self._gone:
            return
        self._gone = True
        if self._leader is not None and not self._asked:
            self._interrupted = True
            self._leader.cancel()

    async def abandon(self) -> None:
        """It is over before its end; what was generated is counted."""
        self.ending = Ending.ABORTED
        await self._close()

    async def played(self, environment: Environment) -> Score | None:
        """Its reward, once `environment` has led it to its end; None if it is not wanted."""
        score = await self._led(environment)
        if not await self._close():
            return None
        return NO_REWARD if score is None else score

    def trajectory(self, sample: int, started_version: int, score: Score) -> Trajectory:
        """What is trained on."""
        prompt, made, given = Int32s.of(self.prompt.tokens), self.made, len(self.prompt.tokens)
        return Trajectory(
            sample=sample,
            started_version=started_version,
            tokens=prompt + made.tokens,
            loss_mask=Bools(bytes(given) + self.mask),
            logprobs=Float32s.same(0.0, given) + made.logprobs,
            versions=Int32s.same(-1, given) + made.versions,
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
            return min((version for version in self.made.versions if version >= 0), default=self.first.version)
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
        await self.abandon()
        return None

    def _turn(self) -> Turn:
        given = Int32s.of(self.prompt.tokens)
        return Turn(self.turns, given + self.response if self.made else given, self.room)

    def _take(self, started: Started) -> None:
        made = started.generation
        self.made, self.mask = self.made + made.made, self.mask + CHOSEN * len(made.made)
        self.first = self.first or started
        self.turns += 1
        self.generated += len(made.made)
        self.ending = made.ending

    def _checked(self, tokens: Sequence[int]) -> Int32s:
        """Tokens that its environment gave, as engines take them; others would be an engine's end."""
        if tokens is self.made.tokens:
            return self.made.tokens
        if isinstance(tokens, Int32s):
            array = tokens.array
            wrong = array[(array < 0) | (array >= self.vocabulary)].tolist()
        else:
            tokens = [operator.index(token) for token in tokens]
            wrong = [token for token in tokens if not 0 <= token < self.vocabulary]
        if wrong:
            size = self.vocabulary
            raise ValueError(f"{wrong[0]} is no token: the policy has {size}, from 0 to {size - 1}")
        return Int32s.of(tokens)

    async def _close(self) -> bool:
        """Nothing more is to be generated; whether it is wanted."""
        if self.wanted is None:
            self.at = asyncio.get_running_loop().time()
            self.wanted = await self.closed(self)
        return self.wanted
