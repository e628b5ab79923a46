"""One dispatch under way: from a prompt to a scored group, or to the reason why there is none.

    prompt --> G (+ extra) x ( queue --> engine --> verifier )  --> TrajectoryGroup
                                                           `------> Discard: it was given up

- Its responses are requests of their own; a reward starts as soon as its response ends.
- A request that no engine was left for is sent again, with its seed; what the others have is kept meanwhile.
- Of responses beyond G the first G to end are kept, the others are aborted; their tokens are counted.
- `give_up` aborts what still runs. The dispatch ends as a discard, with all tokens that were made for it.
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
from rollflow.tasks.engines.base import Generation, GenerationRequest
from rollflow.tasks.rollout.limits import RolloutLimits
from rollflow.tasks.rollout.proxy import InferenceProxy, RequestOptions, Reservation, Started
from rollflow.tasks.verifiers.base import Score
from rollflow.tasks.verifiers.pool import ScoreRequest

T = TypeVar("T")
WHOLE = -1  # in place of a sample: all of them


@dataclass(frozen=True, slots=True)
class GroupPorts:
    """What a dispatch works with. `generated` is told of each response that ended, and may hold its reward back."""

    limits: RolloutLimits
    proxy: InferenceProxy
    score: Callable[[ScoreRequest], Awaitable[Score]]
    generated: Callable[[int], Awaitable[None]]  # tokens
    started: Callable[[GroupRollout, int | None], None]  # its oldest start is known or has changed; with the former


@dataclass(eq=False)
class GroupRollout:
    """See the module's docstring."""

    key: GroupKey
    ports: GroupPorts
    responses: int  # requests in all, G of them wanted
    number: int  # of the dispatches of its scheduler
    awaited: bool = field(kw_only=True)  # a batch waits for it rather than leave it behind
    unanswered: int = field(init=False)  # requests whose end `generated` was not told of
    _reason: DiscardReason | None = None
    _within: Reservation | None = None
    _starts: dict[int, int] = field(default_factory=dict)  # sample -> version
    _tries: Counter[int] = field(default_factory=Counter)  # sample, or WHOLE -> times it failed
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
        """End its requests; those that have ended already are nothing to the proxy."""
        await self.ports.proxy.abort([self._id(sample) for sample in range(self.responses)])

    def _id(self, sample: int) -> str:
        """Another one for each try: an engine may still know the one before."""
        return f"{self.key.prompt}.{self.key.attempt}.{sample}" + "'" * self._tries[sample]

    async def run(self, prompt: Prompt) -> TrajectoryGroup | Discard:
        """Generate and score until there are G trajectories, or none are wanted any more.

        Raises:
            EngineFailed: no engine was left for one of its requests, `RolloutLimits.attempts` times.
        """
        made: list[Trajectory | None] = []
        try:
            if self.ports.limits.whole_groups:
                reserve = functools.partial(self.ports.proxy.reserve, self.responses, self.key.prompt)
                self._within = await self._insist(WHOLE, reserve)
            async with asyncio.TaskGroup() as samples:
                tasks = [samples.create_task(self._sample(prompt, sample)) for sample in range(self.responses)]
            made = [task.result() for task in tasks]
        finally:
            self._release()
        if self._reason is not None:
            started = self.ports.proxy.version if self._oldest is None else self._oldest
            return Discard(self.key, self._reason, started, self._tokens)
        kept = tuple(one for one in made if one is not None)
        return TrajectoryGroup(self.key, prompt.id, prompt.domain, kept, surplus_tokens=self._surplus)

    def _release(self) -> None:
        if self._within is not None:
            self._within.release()

    async def _sample(self, prompt: Prompt, sample: int) -> Trajectory | None:
        """One response and its reward; None if it is not among those that are kept."""
        clock = asyncio.get_running_loop().time
        if self._reason is not None:
            return None
        began = clock()
        started = await self._response(prompt, sample)
        if started is None:
            return None
        made, generated = started.generation, clock()
        self.unanswered -= 1
        if self.unanswered == 0:
            self._release()
        await self.ports.generated(len(made.tokens))
        if not await self._is_kept(made):
            return None
        score = await self.ports.score(ScoreRequest(made.tokens, prompt.reference))
        given = len(prompt.tokens)
        return Trajectory(
            sample=sample,
            started_version=self._age(started),
            tokens=prompt.tokens + made.tokens,
            loss_mask=(False,) * given + (True,) * len(made.tokens),
            logprobs=(0.0,) * given + made.logprobs,
            versions=(-1,) * given + made.versions,
            reward=score.reward,
            reason=score.reason,
            ending=Ending(made.ending),
            generation_seconds=generated - began,
            reward_seconds=clock() - generated,
        )

    async def _response(self, prompt: Prompt, sample: int) -> Started | None:
        limits = self.ports.limits
        asked = RequestOptions(self.key.prompt, self.key, functools.partial(self._note_start, sample), self._within)

        def generate() -> Awaitable[Started]:
            request = GenerationRequest(
                id=self._id(sample),
                prompt=prompt.tokens,
                max_new_tokens=limits.max_new_tokens,
                temperature=limits.temperature,
                seed=sample_seed(limits.seed, self.key.prompt, sample),
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
        former, self._oldest = self._oldest, min(self._starts.values())
        if former != self._oldest:
            self.ports.started(self, former)

    async def _is_kept(self, made: Generation) -> bool:
        """Count a response; the G-th that ends makes the others surplus."""
        self._tokens += len(made.tokens)
        if made.ending is Ending.ABORTED or self._ended == self.ports.limits.group_size:
            self._surplus += len(made.tokens)
            return False
        self._ended += 1
        if self._ended == self.ports.limits.group_size < self.responses:
            await self._abort()
        return self._reason is None

    def _age(self, started: Started) -> int:
        """The version a response's staleness counts from."""
        if self.ports.limits.staleness == "oldest-token":
            return min(started.generation.versions, default=started.version)
        return started.version


def sample_seed(seed: int, prompt: int, sample: int) -> int:
    """A 63-bit seed for one response. Every attempt has the same: a prompt that was too slow must not draw shorter."""
    text = f"{seed}:{prompt}:{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
