"""One dispatch under way: from a prompt to a scored group, or to the reason why there is none.

    prompt --> G (+ extra) x ( queue --> engine --> verifier )  --> TrajectoryGroup
               = an episode, led by the environment         `-----> Discard: it was given up

- Its episodes run on their own; a reward starts as soon as its response ends.
- A request that no engine was left for is sent again, with its seed; what the others have is kept meanwhile.
- Of responses beyond G the first G to end are kept, the others are aborted; their tokens are counted.
- `give_up` aborts what still runs. The dispatch ends as a discard, with all tokens that were made for it.
- An episode whose environment thinks, between two turns, has no request that could be aborted: it is interrupted.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from rollflow.storage.errors import EngineFailed
from rollflow.storage.records import Discard, DiscardReason, Ending, GroupKey, Prompt, Trajectory, TrajectoryGroup
from rollflow.storage.token_arrays import ANY_TOKEN
from rollflow.tasks.engines.base import GenerationRequest
from rollflow.tasks.environments.base import Environment
from rollflow.tasks.environments.single_turn import SINGLE_TURN
from rollflow.tasks.rollout.episode import PlayedEpisode, Turn
from rollflow.tasks.rollout.limits import RolloutLimits
from rollflow.tasks.rollout.proxy import InferenceProxy, RequestOptions, Started
from rollflow.tasks.verifiers.base import Score
from rollflow.tasks.verifiers.pool import ScoreRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupPorts:
    """What a dispatch works with. `generated` is told of each response that ended, and may hold its reward back."""

    limits: RolloutLimits
    proxy: InferenceProxy
    score: Callable[[ScoreRequest], Awaitable[Score]]
    generated: Callable[[int], Awaitable[None]]  # tokens
    started: Callable[[GroupRollout, int], None]  # the version of its oldest start is known, or has changed
    environment: Environment = SINGLE_TURN
    vocabulary: int = ANY_TOKEN  # tokens that the policy has


@dataclass(eq=False)
class GroupRollout:
    """See the module's docstring."""

    key: GroupKey
    ports: GroupPorts
    responses: int  # requests in all, G of them wanted
    number: int  # of the dispatches of its scheduler
    awaited: bool = field(kw_only=True)  # a batch waits for it rather than leave it behind
    redraws: int = field(default=0, kw_only=True)  # times its prompt was in a batch that is not finite
    unanswered: int = field(init=False)  # requests whose end `generated` was not told of
    _reason: DiscardReason | None = None
    _playing: set[PlayedEpisode] = field(default_factory=set)
    _starts: dict[int, int] = field(default_factory=dict)  # sample -> version
    _turns: Counter[int] = field(default_factory=Counter)  # sample -> the turn of its episode
    _tries: Counter[int] = field(default_factory=Counter)  # sample -> times it failed
    _oldest: int | None = None
    _ended: int = 0  # responses that ended by themselves
    _tokens: int = 0  # of all responses
    _surplus: int = 0  # of those that are not kept

    def __post_init__(self) -> None:
        self.unanswered = self.responses

    @property
    def started_version(self) -> int | None:
        """The oldest version one of its requests was started under; None before the first."""
        return self._oldest

    async def give_up(self, reason: DiscardReason) -> None:
        """Abort what runs; the dispatch ends as a discard for this reason."""
        self._reason = self._reason or reason
        await self._abort()

    async def _abort(self) -> None:
        """End its episodes and their requests; those that have ended already are nothing to the proxy."""
        for episode in self._playing:
            episode.let_go()
        await self.ports.proxy.abort([self._id(sample) for sample in range(self.responses)])

    def _id(self, sample: int) -> str:
        """Another one for each turn and try: an engine may still know the one before."""
        turn = f".{self._turns[sample]}" if self._turns[sample] else ""
        return f"{self.key.prompt}.{self.key.attempt}.{sample}{turn}" + "'" * self._tries[sample]

    async def run(self, prompt: Prompt) -> TrajectoryGroup | Discard:
        """Generate and score until there are G trajectories, or none are wanted any more.

        Raises:
            EngineFailed: no engine was left for one of its requests, `RolloutLimits.attempts` times.
        """
        async with asyncio.TaskGroup() as samples:
            tasks = [samples.create_task(self._sample(prompt, sample)) for sample in range(self.responses)]
        made = [task.result() for task in tasks]
        if self._reason is not None:
            started = self.ports.proxy.version if self._oldest is None else self._oldest
            return Discard(self.key, self._reason, started, self._tokens)
        kept = tuple(one for one in made if one is not None)
        return TrajectoryGroup(self.key, prompt.id, prompt.domain, kept, surplus_tokens=self._surplus)

    async def _sample(self, prompt: Prompt, sample: int) -> Trajectory | None:
        """One episode to its reward; None if it is not among those that are kept."""
        ask = functools.partial(self._generation, sample)
        ports = self.ports
        episode = PlayedEpisode(prompt, ports.limits.max_new_tokens, ask, self._closed, ports.score, ports.vocabulary)
        if self._reason is not None:
            await episode.abandon()
            return None
        self._playing.add(episode)
        try:
            score = await episode.played(self.ports.environment)
        finally:
            self._playing.discard(episode)
        if score is None:
            return None
        return episode.trajectory(sample, episode.started_version(self.ports.limits.staleness), score)

    async def _generation(self, sample: int, turn: Turn) -> Started | None:
        """One generation of an episode. Its age is that of the first: the others' starts are nobody's concern."""
        limits = self.ports.limits
        on_start = None if turn.number else functools.partial(self._note_start, sample)
        asked = RequestOptions(self.key.prompt, self.key, on_start)
        self._turns[sample] = turn.number

        def generate() -> Awaitable[Started]:
            request = GenerationRequest(
                id=self._id(sample),
                prompt=turn.prompt,
                max_new_tokens=turn.max_new_tokens,
                temperature=limits.temperature,
                seed=sample_seed(limits.seed, self.key.prompt, sample, turn.number, self.redraws),
            )
            return self.ports.proxy.generate(request, asked)

        return await self._insist(sample, generate)

    async def _insist(self, sample: int, ask: Callable[[], Awaitable[T]]) -> T | None:
        """Ask the engines until one answers; None if all failed when nothing was wanted any more."""
        while self._reason is None:
            try:
                return await ask()
            except EngineFailed:
                self._tries[sample] += 1
                if self.ports.proxy.version < 0 or self._tries[sample] == self.ports.limits.attempts:
                    raise
        return None

    def _note_start(self, sample: int, version: int) -> None:
        self._starts[sample] = version
        oldest = min(self._starts.values())
        if oldest != self._oldest:
            self._oldest = oldest
            self.ports.started(self, oldest)

    async def _closed(self, episode: PlayedEpisode) -> bool:
        """All of an episode is generated; whether it is kept."""
        self.unanswered -= 1
        await self.ports.generated(episode.generated)
        return await self._is_kept(episode)

    async def _is_kept(self, episode: PlayedEpisode) -> bool:
        """Count a response; the G-th that ends makes the others surplus."""
        self._tokens += episode.generated
        if episode.ending is Ending.ABORTED or self._ended == self.ports.limits.group_size:
            self._surplus += episode.generated
            return False
        self._ended += 1
        if self._ended == self.ports.limits.group_size < self.responses:
            await self._abort()
        return self._reason is None


def sample_seed(seed: int, prompt: int, sample: int, turn: int = 0, redraws: int = 0) -> int:
    """A 63-bit seed for one generation. Every attempt has the same: what was too slow must not draw shorter. Only what
    was in a batch that is not finite is drawn anew.
    """
    text = f"{seed}:{prompt}:{sample}" + (f":{turn}" if turn else "") + (f"/{redraws}" if redraws else "")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
