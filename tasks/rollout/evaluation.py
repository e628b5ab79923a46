"""Evaluation: measures, while training continues, the share of held-out prompts that a policy version answers
correctly.

- Training never waits for an evaluation, but the run ends only after the last evaluation.
- During an evaluation, its engine serves no other request, so that every token comes from the evaluated policy version.
- Policy versions are evaluated in order. A restarted process evaluates the versions that a dead process did not finish.
- A policy version that cannot be evaluated is skipped, and the reason is stored.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, takewhile
from typing import Any, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from rollflow.storage.errors import Corrupt, EngineFailed, Missing
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.records import Outcome, Prompt
from rollflow.storage.token_arrays import ANY_TOKEN
from rollflow.tasks.engines.base import Engine, GenerationRequest
from rollflow.tasks.environments.base import Environment, find_removal
from rollflow.tasks.environments.ports import NO_PORTS, EnvironmentPorts
from rollflow.tasks.environments.single_turn import SINGLE_TURN
from rollflow.tasks.rollout.episode import PlayedEpisode, Turn
from rollflow.tasks.rollout.proxy import InferenceProxy, VersionedGeneration, WeightsProbe
from rollflow.tasks.scorers.base import Score, ScoreRequest, Unjudged
from rollflow.tasks.statistics.proportions import mean_pass_at
from rollflow.tasks.statistics.summaries import ResponseSummary, combine_domains

T = TypeVar("T")
UNSAFE = re.compile(r"[^\w.-]")  # characters that a metric's name may not contain
AGAIN_SECONDS = 1.0  # seconds before an evaluation is retried after its engine died
JUDGE_PAUSES = (10.0, 20.0, 40.0, 80.0, 160.0, 320.0)  # seconds before an evaluation is retried after a judge failed


@dataclass(frozen=True, slots=True)
class DomainResult:
    """The accuracy, mean reward and number of responses of one evaluation, on the held-out prompts of one domain."""

    accuracy: float
    reward: float
    responses: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of one evaluation.

    With several domains, accuracy, reward and pass@k are weighted means over the domains (see `evaluation.mean`).

    `sets` maps the name of each evaluation set to its result; these results do not count towards `accuracy`.

    `pass_at` maps k = 2, 4, 8, ... to pass@k, the chance that at least one of k responses to a prompt is correct.
    `measures` contains the values that the environment computed from the policy's probabilities
    (`Environment.measure`).
    """

    version: int
    accuracy: float
    reward: float
    responses: int
    mean_tokens: float
    pinned: bool  # True if every token was sampled from policy version `version`
    # k -> pass@k; empty if each prompt gets only one response
    pass_at: Mapping[int, float] = field(default_factory=dict)
    domains: Mapping[str, DomainResult] = field(default_factory=dict)  # empty with one domain
    sets: Mapping[str, DomainResult] = field(default_factory=dict)
    measures: Mapping[str, float] = field(default_factory=dict)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The results as metrics for MLflow, which allows no @ in the name of a metric."""
        found = {safe_name(name): value for name, value in self.measures.items()}
        found |= {"accuracy": self.accuracy, **{f"pass_at_{k}": share for k, share in self.pass_at.items()}}
        for domain, result in [*self.domains.items(), *self.sets.items()]:
            found |= {f"accuracy_{safe_name(domain)}": result.accuracy, f"reward_{safe_name(domain)}": result.reward}
        return found


class EvaluatedResponse(NamedTuple):
    """A scored response to a held-out prompt."""

    prompt: Prompt
    score: Score
    versions: tuple[int, ...]
    turns: int


@dataclass(frozen=True, slots=True)
class EvaluationSkipped:
    """The record of a policy version that could not be evaluated, with the reason."""

    version: int
    reason: str


EVALUATION, SKIPPED = TypeAdapter(Evaluation), TypeAdapter(EvaluationSkipped)


def safe_name(domain: str) -> str:
    """Replace each character of a domain's name that the name of a metric may not contain."""
    return UNSAFE.sub("_", domain)


def evaluation_path(version: int) -> str:
    """Return the storage path of the evaluation of policy version `version`."""
    return f"evaluations/{version:08d}.json"


def skipped_path(version: int) -> str:
    """Return the storage path of the file that says why policy version `version` has no evaluation."""
    return f"evaluations_skipped/{version:08d}.json"


def is_evaluated(run: ObjectStore, version: int) -> bool:
    """Return whether policy version `version` was evaluated or deliberately skipped.

    A policy version with a damaged record counts as not evaluated.
    """
    return read_evaluation(run, version) is not None or _read(run, skipped_path(version), SKIPPED) is not None


def read_evaluation(run: ObjectStore, version: int) -> Evaluation | None:
    """Read the evaluation of policy version `version`; return None if the evaluation is missing or damaged."""
    return _read(run, evaluation_path(version), EVALUATION)


def _read(run: ObjectStore, path: str, kind: TypeAdapter[T]) -> T | None:
    try:
        return kind.validate_json(run.get(path))
    except (Missing, Corrupt, ValidationError):
        return None


def read_evaluations(run: ObjectStore, after: int = -1, last: int | None = None) -> list[Evaluation]:
    """Read the evaluations of the policy versions above `after` and up to `last`, in ascending order."""
    paths = run.list("evaluations", after=evaluation_path(after) if after >= 0 else "")
    end = "" if last is None else evaluation_path(last)
    wanted = takewhile(lambda path: not end or path <= end, paths)
    return [evaluation for path in wanted if (evaluation := _read(run, path, EVALUATION))]


def read_newest(run: ObjectStore) -> Evaluation | None:
    """Read the evaluation of the newest evaluated policy version; return None if no version was evaluated."""
    for path in reversed(list(run.list("evaluations"))):
        if found := _read(run, path, EVALUATION):
            return found
    return None


def store_evaluation(run: ObjectStore, evaluation: Evaluation) -> None:
    """Store the result of an evaluation in the run's storage."""
    stored = {name: value for name, value in asdict(evaluation).items() if value or name != "measures"}
    run.put(evaluation_path(evaluation.version), json.dumps(stored).encode())


def store_skipped(run: ObjectStore, skip: EvaluationSkipped) -> None:
    """Store the reason why the evaluation of a policy version was skipped."""
    run.put(skipped_path(skip.version), json.dumps(asdict(skip)).encode())


def read_skipped(run: ObjectStore) -> list[EvaluationSkipped]:
    """Read which policy versions could not be evaluated, and why."""
    return [skip for path in run.list("evaluations_skipped") if (skip := _read(run, path, SKIPPED))]


def is_right(score: Score, by_value: bool) -> bool:
    """Return whether a response counts as correct: by its score's outcome or, with `by_value`, if its score is 1."""
    return score.value == 1.0 if by_value else score.outcome is Outcome.CORRECT


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Generates and scores responses to the held-out prompts."""

    prompts: Sequence[Prompt]
    samples: int
    temperature: float
    max_new_tokens: int
    score: Callable[[ScoreRequest], Awaitable[Score]]
    environment: Environment = SINGLE_TURN
    vocabulary: int = ANY_TOKEN  # size of the policy's vocabulary
    ports: EnvironmentPorts = NO_PORTS
    # domain -> weight of the domain in the accuracy; if empty, every response has the same weight
    shares: Mapping[str, float] = field(default_factory=dict)
    # if True, a response is correct if its reward is 1; if False, a response is correct if its outcome is "correct"
    by_value: bool = False
    sets: Mapping[str, Sequence[Prompt]] = field(default_factory=dict)  # prompts of the evaluation sets, by name

    async def run(self, proxy: InferenceProxy, version: int) -> Evaluation:
        """Evaluate all held-out prompts that can be played; the caller must keep the engines at version `version`.

        Raises:
            Unjudged: a response could not be judged; counting the response as wrong would falsify the accuracy.
        """
        done = await self.answer_all(proxy, version)
        removed = [bool(find_removal(self.environment, one.prompt)) for one in done]
        main = removed[: len(self.prompts) * self.samples].count(False)
        done = [one for one, is_removed in zip(done, removed, strict=True) if not is_removed]
        if self.prompts and not main:
            raise Unjudged("nothing can be evaluated, because the environments of all held-out prompts were removed")
        if missing := [one.score.reason for one in done if one.score.outcome is Outcome.UNJUDGED]:
            raise Unjudged(
                f"{len(missing)} of {len(done)} responses could not be judged, the first one because: {missing[0]}"
            )
        judged = [(one.prompt.domain, one.score) for one in done]
        sets = self._summarise_sets(judged[main:])
        judged, pinned = judged[:main], all(v == version for one in done for v in one.versions)
        done = done[:main]
        by_domain = {domain: [score for one, score in judged if one == domain] for domain, _ in judged}
        domains = {domain: self._summarise(scores) for domain, scores in by_domain.items()}
        every = [score for _, score in judged]
        total = combine_domains(domains, self.shares) if self.shares else self._summarise(every)
        return Evaluation(
            version=version,
            accuracy=total.accuracy,
            reward=total.reward,
            responses=len(done),
            mean_tokens=sum(len(one.versions) for one in done) / len(done),
            pinned=pinned,
            pass_at=total.pass_at,
            domains={
                domain: DomainResult(one.accuracy, one.reward, len(by_domain[domain]))
                for domain, one in domains.items()
                if len(domains) > 1
            },
            sets=sets,
        )

    async def answer_all(
        self, proxy: InferenceProxy, version: int, note: Callable[[EvaluatedResponse], None] = lambda _: None
    ) -> list[EvaluatedResponse]:
        """Return the scored responses to all held-out prompts and evaluation sets; `note` is called with each response
        as soon as it is scored.
        """

        async def answer(prompt: Prompt, sample: int) -> EvaluatedResponse:
            note(found := await self._answer_prompt(proxy, version, prompt, sample))
            return found

        every = chain(self.prompts, *self.sets.values())
        return await asyncio.gather(*(answer(prompt, sample) for prompt in every for sample in range(self.samples)))

    def _summarise_sets(self, judged: Sequence[tuple[str, Score]]) -> dict[str, DomainResult]:
        """Summarise the scores of each evaluation set; `judged` has pairs of a set's name and a score."""
        scores_of = {name: [score for one, score in judged if one == name] for name in self.sets}
        found = {name: self._summarise(scores) for name, scores in scores_of.items() if scores}
        return {name: DomainResult(one.accuracy, one.reward, len(scores_of[name])) for name, one in found.items()}

    def _summarise(self, scores: Sequence[Score]) -> ResponseSummary:
        """Summarise scores that are sorted by prompt, with the same number of responses to each prompt."""
        passed = [is_right(score, self.by_value) for score in scores]
        right = [sum(passed[start : start + self.samples]) for start in range(0, len(passed), self.samples)]
        return ResponseSummary(
            sum(passed) / len(scores),
            sum(score.value for score in scores) / len(scores),
            mean_pass_at(right, self.samples),
        )

    async def _answer_prompt(
        self, proxy: InferenceProxy, version: int, prompt: Prompt, sample: int
    ) -> EvaluatedResponse:
        async def ask(turn: Turn) -> VersionedGeneration:
            request = GenerationRequest(
                id=f"evaluation.{version}.{prompt.index}.{sample}" + (f".{turn.number}" if turn.number else ""),
                prompt=turn.prompt,
                max_new_tokens=turn.max_new_tokens,
                temperature=self.temperature,
                # The seed contains the turn's number, because all turns would otherwise use the same random numbers.
                seed=episode.seed + (turn.number << 40),
                stop=turn.stop,
            )
            return await proxy.generate(request)

        episode = PlayedEpisode(prompt, self.max_new_tokens, ask, _want_every, self.score, self.vocabulary, self.ports)
        episode.seed = prompt.index * self.samples + sample
        score = await episode.play(self.environment)
        assert score is not None, "every episode of an evaluation is wanted"
        versions = tuple(one for branch in episode.lived.played for one in branch.made.versions if one >= 0)
        return EvaluatedResponse(prompt, episode.find_unjudged(score) or score, versions, episode.turns)


async def _want_every(_: PlayedEpisode) -> bool:
    """Return True, because an evaluation keeps every episode."""
    return True


@dataclass(frozen=True, slots=True)
class EvaluationPorts:
    """The functions that an `Evaluations` object calls.

    - `wanted` returns whether a policy version is to be evaluated.
    - `evaluated` returns whether a policy version has been evaluated already.
    - `engine` lends an inference engine to the evaluation, as a context manager.
    - `fetch` loads the weights of a policy version and the log-probabilities that verify the weights. If the weights
      cannot be read, it raises `Missing` or `Corrupt`.
    - `keep` stores the result of an evaluation.

    The evaluation of a policy version is skipped after `tries` engine failures.
    """

    wanted: Callable[[int], bool]
    evaluated: Callable[[int], Awaitable[bool]]
    engine: Callable[[], AbstractAsyncContextManager[Engine]]
    fetch: Callable[[int], Awaitable[tuple[Any, WeightsProbe]]]
    evaluator: Evaluator
    keep: Callable[[Evaluation | EvaluationSkipped], Awaitable[None]]
    slots: int
    tries: int


class Evaluations:
    """Evaluates, in order, every published policy version that `wanted` selects."""

    def __init__(self, means: EvaluationPorts, last: int) -> None:
        self._means, self._last = means, last
        self._due: deque[int] = deque()
        self._seen = -1  # newest published policy version that is known
        self._news = asyncio.Event()
        self._judge_pauses = deque(JUDGE_PAUSES)

    @property
    def due(self) -> int:
        """Number of published policy versions that still have to be evaluated."""
        return len(self._due)

    def note_published(self, version: int) -> None:
        """Record that all policy versions up to this one are published."""
        self._due.extend(filter(self._means.wanted, range(self._seen + 1, version + 1)))
        self._seen = max(self._seen, version)
        self._news.set()

    async def run(self) -> None:
        """Evaluate the selected policy versions in order; return after the run's last version was evaluated."""
        while self._due or self._seen < self._last:
            if not self._due:
                self._news.clear()
                await self._news.wait()
                continue
            if not await self._means.evaluated(self._due[0]):
                await self._means.keep(await self._evaluate(self._due[0]))
            self._due.popleft()

    async def _evaluate(self, version: int) -> Evaluation | EvaluationSkipped:
        failures: list[EngineFailed] = []
        while len(failures) < self._means.tries:
            try:
                async with self._means.engine() as engine:
                    try:
                        found = await self._evaluate_on(engine, version)
                        self._judge_pauses = deque(JUDGE_PAUSES)
                        return found
                    except EngineFailed as error:
                        failures.append(error)
            except Unjudged as error:
                if not self._judge_pauses:
                    return EvaluationSkipped(version, str(error))
                await asyncio.sleep(self._judge_pauses.popleft())
                continue
            except (Missing, Corrupt) as error:
                return EvaluationSkipped(version, f"the weights of this version are gone: {error}")
            except EngineFailed:  # no engine is free, or the borrowed engine died and will be replaced
                if (task := asyncio.current_task()) and task.cancelling():
                    raise  # the evaluation was cancelled while the borrowed engine died
            await asyncio.sleep(AGAIN_SECONDS)
        return EvaluationSkipped(
            version,
            f"engines failed {len(failures)} times while they evaluated this version, the last time: {failures[-1]}",
        )

    async def _evaluate_on(self, engine: Engine, version: int) -> Evaluation:
        weights, probe = await self._means.fetch(version)
        proxy = InferenceProxy([engine], self._means.slots)
        await proxy.update(version, weights, probe, "continue")
        evaluator = self._means.evaluator
        measures = await evaluator.environment.measure(engine.logprobs, evaluator.ports)
        return replace(await evaluator.run(proxy, version), measures=measures)
