"""Evaluation: the share of held-out prompts answered right under one policy version."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import asdict, dataclass

from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.records import Prompt
from rollflow.tasks.engines.base import GenerationRequest
from rollflow.tasks.rewards.pool import ScoreRequest
from rollflow.tasks.rewards.verifier import Score
from rollflow.tasks.rollout.proxy import InferenceProxy


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of one evaluation; `accuracy` is the share of responses with the full reward 1."""

    version: int
    accuracy: float
    reward: float
    responses: int
    mean_tokens: float
    pinned: bool  # every token came from `version`


def evaluation_path(version: int) -> str:
    """Where the evaluation of `version` lies."""
    return f"evaluations/{version:08d}.json"


def evaluations(run: ObjectStore, known: Collection[int] = ()) -> list[Evaluation]:
    """The evaluations of a run, by version, but those of `known` versions."""
    skip = {evaluation_path(version) for version in known}
    return [Evaluation(**json.loads(run.get(path))) for path in run.list("evaluations") if path not in skip]


def store_evaluation(run: ObjectStore, evaluation: Evaluation) -> None:
    """Keep an evaluation in the run's storage."""
    run.put(evaluation_path(evaluation.version), json.dumps(asdict(evaluation)).encode())


@dataclass(frozen=True, slots=True)
class Evaluator:
    """How held-out prompts are asked."""

    prompts: Sequence[Prompt]
    samples: int
    temperature: float
    max_new_tokens: int
    score: Callable[[ScoreRequest], Awaitable[Score]]

    async def run(self, proxy: InferenceProxy, version: int) -> Evaluation:
        """Ask every prompt; the caller keeps the engines at `version` meanwhile."""
        asked = [(prompt, sample) for prompt in self.prompts for sample in range(self.samples)]
        done = await asyncio.gather(*(self._one(proxy, version, prompt, sample) for prompt, sample in asked))
        return Evaluation(
            version=version,
            accuracy=sum(score.reward == 1.0 for score, _ in done) / len(done),
            reward=sum(score.reward for score, _ in done) / len(done),
            responses=len(done),
            mean_tokens=sum(len(versions) for _, versions in done) / len(done),
            pinned=all(v == version for _, versions in done for v in versions),
        )

    async def _one(
        self, proxy: InferenceProxy, version: int, prompt: Prompt, sample: int
    ) -> tuple[Score, tuple[int, ...]]:
        request = GenerationRequest(
            id=f"evaluation.{version}.{prompt.index}.{sample}",
            prompt=prompt.tokens,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            seed=prompt.index * self.samples + sample,
        )
        made = (await proxy.generate(request)).generation
        return await self.score(ScoreRequest(made.tokens, prompt.reference)), made.versions
