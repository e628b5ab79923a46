"""Evaluation: the share of held-out prompts answered right under one policy version, beside training.

    newest version published --> those that are due --> an engine: the version's weights --> ask --> store
                                       ^                         |
                                       +--- the engine died -----+

- Nothing waits for an evaluation but the end of the run, which waits for all.
- Nothing else uses the engine meanwhile, so every token comes from the version that is evaluated.
- Versions are evaluated in their order, also those that the engines of training skipped. Storage tells what is due, so
  a new process does what a dead one had not stored.
- A version whose weights are gone is skipped, and the reason is stored.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from rollflow.storage.errors import Corrupt, EngineFailed, Missing
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.records import Prompt
from rollflow.storage.token_arrays import ANY_TOKEN
from rollflow.tasks.engines.base import Engine, GenerationRequest
from rollflow.tasks.environments.base import Environment
from rollflow.tasks.environments.single_turn import SINGLE_TURN
from rollflow.tasks.rollout.episode import PlayedEpisode, Turn
from rollflow.tasks.rollout.proxy import InferenceProxy, Probe, Started
from rollflow.tasks.verifiers.base import Score
from rollflow.tasks.verifiers.pool import ScoreRequest

T = TypeVar("T")
AGAIN_SECONDS = 1.0  # before an evaluation whose engine died is begun again


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of one evaluation; `accuracy` is the share of responses with the full reward 1, which is pass@1.

    `pass_at` has pass@k by k, for k = 2, 4, 8, ... up to the responses to a prompt: the chance that one of k has it.
    """

    version: int
    accuracy: float
    reward: float
    responses: int
    mean_tokens: float
    pinned: bool  # every token came from `version`
    pass_at: Mapping[int, float] = field(default_factory=dict)  # none of one response a prompt

    @property
    def metrics(self) -> Mapping[str, float]:
        """What MLflow has of it; it takes no @ in a name."""
        return {"accuracy": self.accuracy, **{f"pass_at_{k}": share for k, share in self.pass_at.items()}}


@dataclass(frozen=True, slots=True)
class Skipped:
    """A version that could not be evaluated."""

    version: int
    reason: str


EVALUATION, SKIPPED = TypeAdapter(Evaluation), TypeAdapter(Skipped)


def evaluation_path(version: int) -> str:
    """Where the evaluation of `version` lies."""
    return f"evaluations/{version:08d}.json"


def skipped_path(version: int) -> str:
    """Where it is written why `version` has no evaluation."""
    return f"evaluations_skipped/{version:08d}.json"


def evaluated(run: ObjectStore, version: int) -> bool:
    """Whether `version` was evaluated or skipped. What is damaged is neither: it is made again."""
    return evaluation_of(run, version) is not None or _read(run, skipped_path(version), SKIPPED) is not None


def evaluation_of(run: ObjectStore, version: int) -> Evaluation | None:
    """The evaluation of `version`, if there is one that can be read."""
    return _read(run, evaluation_path(version), EVALUATION)


def _read(run: ObjectStore, path: str, kind: TypeAdapter[T]) -> T | None:
    try:
        return kind.validate_json(run.get(path))
    except (Missing, Corrupt, ValidationError):
        return None


def evaluations(run: ObjectStore, after: int = -1, last: int | None = None) -> list[Evaluation]:
    """The evaluations of a run, by version: of the versions above `after`, up to `last` if it is given."""
    paths = run.list("evaluations", after=evaluation_path(after) if after >= 0 else "")
    end = "" if last is None else evaluation_path(last)
    wanted = takewhile(lambda path: not end or path <= end, paths)
    return [one for path in wanted if (one := _read(run, path, EVALUATION))]


def store_evaluation(run: ObjectStore, evaluation: Evaluation) -> None:
    """Keep an evaluation in the run's storage."""
    run.put(evaluation_path(evaluation.version), json.dumps(asdict(evaluation)).encode())


def store_skipped(run: ObjectStore, one: Skipped) -> None:
    """Keep the reason in the run's storage."""
    run.put(skipped_path(one.version), json.dumps(asdict(one)).encode())


def skipped(run: ObjectStore) -> list[Skipped]:
    """The versions that could not be evaluated, and why."""
    return [one for path in run.list("evaluations_skipped") if (one := _read(run, path, SKIPPED))]


def pass_at(k: int, responses: int, right: int) -> float:
    """Chance that k of a prompt's responses, drawn without putting back, have a right one: 1 - C(n - c, k) / C(n, k).

    So it is an unbiased estimate of pass@k (Chen et al. 2021, Evaluating large language models trained on code, eq. 1).
    """
    return 1 - math.comb(responses - right, k) / math.comb(responses, k)


def mean_pass_at(right: Sequence[int], samples: int) -> dict[int, float]:
    """k = 2, 4, 8, ... -> mean pass@k over prompts, of which each had so many of `samples` responses right."""
    powers = (2**power for power in range(1, samples.bit_length()))
    return {k: math.fsum(pass_at(k, samples, one) for one in right) / len(right) for k in powers}


@dataclass(frozen=True, slots=True)
class Evaluator:
    """How held-out prompts are asked."""

    prompts: Sequence[Prompt]
    samples: int
    temperature: float
    max_new_tokens: int
    score: Callable[[ScoreRequest], Awaitable[Score]]
    environment: Environment = SINGLE_TURN
    vocabulary: int = ANY_TOKEN  # tokens that the policy has

    async def run(self, proxy: InferenceProxy, version: int) -> Evaluation:
        """Ask every prompt; the caller keeps the engines at `version` meanwhile."""
        asked = [(prompt, sample) for prompt in self.prompts for sample in range(self.samples)]
        done = await asyncio.gather(*(self._one(proxy, version, prompt, sample) for prompt, sample in asked))
        passed = [score.reward == 1.0 for score, _ in done]
        right = [sum(passed[start : start + self.samples]) for start in range(0, len(passed), self.samples)]
        return Evaluation(
            version=version,
            accuracy=sum(passed) / len(done),
            reward=sum(score.reward for score, _ in done) / len(done),
            responses=len(done),
            mean_tokens=sum(len(versions) for _, versions in done) / len(done),
            pinned=all(v == version for _, versions in done for v in versions),
            pass_at=mean_pass_at(right, self.samples),
        )

    async def _one(
        self, proxy: InferenceProxy, version: int, prompt: Prompt, sample: int
    ) -> tuple[Score, tuple[int, ...]]:
        async def ask(turn: Turn) -> Started:
            request = GenerationRequest(
                id=f"evaluation.{version}.{prompt.index}.{sample}" + (f".{turn.number}" if turn.number else ""),
                prompt=turn.prompt,
                max_new_tokens=turn.max_new_tokens,
                temperature=self.temperature,
                seed=prompt.index * self.samples + sample,
            )
            return await proxy.generate(request)

        episode = PlayedEpisode(prompt, self.max_new_tokens, ask, _wanted, self.score, self.vocabulary)
        score = await episode.played(self.environment)
        assert score is not None, "it is wanted"
        return score, tuple(version for version in episode.made.versions if version >= 0)


async def _wanted(_: PlayedEpisode) -> bool:
    """Every episode of an evaluation is."""
    return True


@dataclass(frozen=True, slots=True)
class Means:
    """What `Evaluations` works with.

    `wanted`: the versions to evaluate; `evaluated`: those that were. `engine` lends an engine for the length of a
    block. `fetch` gives a version's weights and probe (`Missing` or `Corrupt`: they are gone). `keep` stores the
    result. After `tries` failures of living engines a version is given up, because each may have cost the run a
    restart.
    """

    wanted: Callable[[int], bool]
    evaluated: Callable[[int], Awaitable[bool]]
    engine: Callable[[], AbstractAsyncContextManager[Engine]]
    fetch: Callable[[int], Awaitable[tuple[Any, Probe]]]
    evaluator: Evaluator
    keep: Callable[[Evaluation | Skipped], Awaitable[None]]
    slots: int
    tries: int


class Evaluations:
    """Evaluates every version that is due. See the module's docstring for the guarantees."""

    def __init__(self, means: Means, last: int) -> None:
        self._means, self._last = means, last
        self._due: deque[int] = deque()
        self._seen = -1  # the newest version that is known
        self._news = asyncio.Event()

    @property
    def due(self) -> int:
        """Published versions that are to be evaluated."""
        return len(self._due)

    def published(self, version: int) -> None:
        """Say that versions up to this one are published."""
        self._due.extend(filter(self._means.wanted, range(self._seen + 1, version + 1)))
        self._seen = max(self._seen, version)
        self._news.set()

    async def run(self) -> None:
        """Evaluate what is due, until the last version is."""
        while self._due or self._seen < self._last:
            if not self._due:
                self._news.clear()
                await self._news.wait()
                continue
            if not await self._means.evaluated(self._due[0]):
                await self._means.keep(await self._evaluate(self._due[0]))
            self._due.popleft()

    async def _evaluate(self, version: int) -> Evaluation | Skipped:
        failures: list[EngineFailed] = []
        while len(failures) < self._means.tries:
            try:
                async with self._means.engine() as engine:
                    try:
                        return await self._on(engine, version)
                    except EngineFailed as error:
                        failures.append(error)
            except (Missing, Corrupt) as error:
                return Skipped(version, f"its weights are gone: {error}")
            except EngineFailed:  # no engine is free; another one comes, and its keeper counts the restarts
                if (task := asyncio.current_task()) and task.cancelling():
                    raise  # cancelled, while a lent engine died: its failure hid the cancellation
            await asyncio.sleep(AGAIN_SECONDS)
        return Skipped(version, f"engines failed at it {len(failures)} times, the last time: {failures[-1]}")

    async def _on(self, engine: Engine, version: int) -> Evaluation:
        weights, probe = await self._means.fetch(version)
        proxy = InferenceProxy([engine], self._means.slots)
        await proxy.update(version, weights, probe, "continue")
        return await self._means.evaluator.run(proxy, version)
