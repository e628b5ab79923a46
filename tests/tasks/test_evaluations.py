"""Tests of evaluations that run beside training: only the run's end waits for them, and no evaluation is lost."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.flows.keepalive.restarts import RestartBudget
from rollflow.storage.audit.audit import audit
from rollflow.storage.errors import Corrupt, EngineFailed
from rollflow.storage.model_input import ModelInput
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.policies import PolicyStore
from rollflow.storage.records import Outcome
from rollflow.tasks.engines.base import Engine, GenerationRequest
from rollflow.tasks.engines.config import TimedEngineConfig, TransformersEngineConfig, VllmEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.environments.base import Environment, Episode, LogProbs
from rollflow.tasks.environments.ports import EnvironmentPorts
from rollflow.tasks.rollout.evaluation import (
    Evaluation,
    EvaluationPorts,
    Evaluations,
    EvaluationSkipped,
    Evaluator,
    evaluation_path,
    is_evaluated,
    read_evaluation,
    read_evaluations,
    read_skipped,
    skipped_path,
    store_evaluation,
    store_skipped,
)
from rollflow.tasks.rollout.proxy import InferenceProxy, WeightsProbe
from rollflow.tasks.run.config import RecoveryConfig, RunConfig
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import Score, ScoreRequest
from rollflow.tasks.statistics.proportions import pass_at
from tests.support.batches import begin, learning, publish, scheduling, staged
from tests.support.pipeline import Pipeline, prompt_at

SLOW = TimedEngineConfig(max_concurrent_requests=8, sigma=0, median_tokens=50, max_new_tokens=64, seconds_per_token=2.0)
LAST = 6


@dataclass
class Beside:
    """Evaluations of every second version of a pipeline, on separate or on borrowed engines."""

    lent: bool = False
    samples: int = 1
    deaths: int = 0  # number of engines that die during an evaluation
    gone: tuple[int, ...] = ()  # versions whose weights are gone
    at: dict[int, int] = field(default_factory=dict)  # evaluated version -> newest loaded version when it was stored

    def __call__(self, pipeline: Pipeline) -> Evaluations:
        self.pipeline = pipeline
        means = EvaluationPorts(
            wanted=lambda version: version % 2 == 0,
            evaluated=self._evaluated,
            engine=pipeline.proxy.borrow_engine if self.lent else self._own,
            fetch=self._fetch,
            evaluator=Evaluator([prompt_at(index) for index in range(8)], self.samples, 0.0, 64, self._score),
            keep=self._keep,
            slots=8,
            tries=RecoveryConfig().restarts,
        )
        return Evaluations(means, pipeline.versions)

    async def _evaluated(self, version: int) -> bool:
        return is_evaluated(self.pipeline.store, version)

    @asynccontextmanager
    async def _own(self) -> AsyncIterator[Engine]:
        engine = TimedEngine(SLOW)
        await engine.start()
        if self.deaths:
            self.deaths -= 1
            asyncio.get_running_loop().call_later(20.0, engine.kill)
        yield engine

    async def _fetch(self, version: int) -> tuple[Path, WeightsProbe]:
        if version in self.gone:
            raise Corrupt(f"version {version} is missing")
        return Path(), WeightsProbe((), (), 0.1)

    async def _score(self, request: ScoreRequest) -> Score:
        return Score(1.0, "fine")

    async def _keep(self, found: Evaluation | EvaluationSkipped) -> None:
        self.at[found.version] = self.pipeline.proxy.version
        if isinstance(found, EvaluationSkipped):
            store_skipped(self.pipeline.store, found)
        else:
            store_evaluation(self.pipeline.store, found)


def ran(beside: Beside | None, **choices: object) -> Pipeline:
    store = choices.pop("store", None) or MemoryStore(uuid4().hex)
    pipeline = Pipeline(store, versions=LAST, evaluating=beside, **choices)  # type: ignore[arg-type]
    run_virtual(pipeline.run())
    return pipeline


@pytest.mark.parametrize("alpha", [0.0, 2.0])
def test_versions_are_published_during_an_evaluation(alpha: float) -> None:
    """One evaluation takes 100 seconds, and the whole training only a few seconds."""
    beside = Beside()
    pipeline = ran(beside, async_ratio=alpha)
    assert beside.at == {0: LAST, 2: LAST, 4: LAST, 6: LAST}
    stored = read_evaluations(pipeline.store)
    assert [(each.version, each.pinned, each.responses) for each in stored] == [(v, True, 8) for v in (0, 2, 4, 6)]


def test_evaluations_do_not_change_on_policy_training() -> None:
    def trained(beside: Beside | None, engines: int) -> list[bytes]:
        pipeline = ran(beside, async_ratio=0.0, engines=engines)
        found = [pipeline.policies.find(version).batch_entry for version in range(1, LAST + 1)]
        files = [pipeline.batches.read_commit(entry).file for entry in found if entry is not None]
        return [pipeline.batches.read(file).to_pybytes() for file in files]

    assert trained(Beside(), 1) == trained(None, 1)
    assert trained(Beside(lent=True), 2) == trained(None, 2)


@pytest.mark.parametrize("alpha", [0.0, 2.0])
def test_engine_borrowed_for_evaluation_returns_afterwards(alpha: float) -> None:
    beside = Beside(lent=True)
    pipeline = ran(beside, async_ratio=alpha, engines=2)
    assert [(each.version, each.pinned) for each in read_evaluations(pipeline.store)] == [
        (v, True) for v in (0, 2, 4, 6)
    ]
    assert sorted(pipeline.proxy.engines) == [0, 1]
    assert {engine.version for engine in pipeline.proxy.engines.values()} == {LAST}
    assert sum(engine._usage.restarted for engine in pipeline.proxy.engines.values()) == 0  # no tokens are lost
    assert pipeline.policies.newest() == LAST


@pytest.mark.long
@given(
    alpha=st.sampled_from([0.0, 1.0, 2.0]),
    in_flight=st.sampled_from(["continue", "restart"]),
    engines=st.integers(2, 3),
    deaths=st.lists(st.tuples(st.floats(0, 4), st.integers(0, 2)), max_size=5),
    seed=st.integers(0, 99),
)
@settings(max_examples=20, deadline=None)
def test_every_evaluation_is_done_despite_engine_deaths(
    alpha: float, in_flight: str, engines: int, deaths: list[tuple[float, int]], seed: int
) -> None:
    pipeline = ran(
        Beside(lent=True, samples=8),
        async_ratio=alpha,
        in_flight=in_flight,
        engines=engines,
        engine_deaths=deaths,
        seed=seed,
    )
    assert [(each.version, each.pinned) for each in read_evaluations(pipeline.store)] == [
        (v, True) for v in (0, 2, 4, 6)
    ]
    assert pipeline.policies.newest() == LAST
    assert audit(pipeline.store).clean


def test_single_engine_is_never_borrowed_for_evaluation() -> None:
    async def main() -> None:
        engine = TimedEngine(SLOW)
        await engine.start()
        proxy = InferenceProxy([engine], 4)
        await proxy.update(0, Path(), WeightsProbe((), (), 0.1), "continue")
        with pytest.raises(EngineFailed, match="no engine can be borrowed"):
            async with proxy.borrow_engine():
                pass
        assert (await proxy.generate(GenerationRequest("r", ModelInput.of((1, 2)), 8, seed=1))).version == 0

    run_virtual(main())


def test_lost_borrowed_engine_is_reported_as_failed() -> None:
    """A lost engine that is not reported would never be restarted, because its actor is alive."""

    class Cut(TimedEngine):
        away = False

        async def fetch(self, version: int, weights: Path) -> None:
            if self.away:
                raise EngineFailed("the weights cannot be had here")

    async def cut_off(proxy: InferenceProxy) -> None:
        async with proxy.borrow_engine() as engine:
            assert isinstance(engine, Cut)
            assert not proxy.failed
            engine.away = True

    async def main() -> None:
        proxy = InferenceProxy([Cut(SLOW), Cut(SLOW)], 4, 600.0)
        await proxy.update(0, Path(), WeightsProbe((), (), 0.1), "continue")
        with pytest.raises(EngineFailed, match="cannot be had"):
            await cut_off(proxy)
        [(place, why)] = proxy.failed.items()
        assert "cannot be had" in why
        await proxy.join(place, Cut(SLOW))
        assert not proxy.failed
        assert sorted(proxy.engines) == [0, 1]

    run_virtual(main())


def test_evaluation_ends_with_the_run_on_a_dead_engine() -> None:
    """The end of the run does not wait for an engine that is never restarted."""

    async def main() -> None:
        engines = [TimedEngine(SLOW), TimedEngine(SLOW)]
        pipeline = Pipeline(MemoryStore(uuid4().hex))
        pipeline.proxy = InferenceProxy(engines, 4, 600.0)
        await pipeline.proxy.update(0, Path(), WeightsProbe((), (), 0.1), "continue")
        due = Beside(lent=True)(pipeline)
        due.note_published(0)
        evaluating = asyncio.create_task(due.run())
        await asyncio.sleep(20.0)
        for engine in engines:
            engine.kill()
        evaluating.cancel()
        assert (await asyncio.wait([evaluating], timeout=1000.0))[0]
        await asyncio.gather(evaluating, return_exceptions=True)

    run_virtual(main())


def test_evaluation_is_repeated_after_its_engine_died() -> None:
    beside = Beside(deaths=3)
    pipeline = ran(beside)
    assert beside.deaths == 0
    assert [(each.version, each.responses) for each in read_evaluations(pipeline.store)] == [
        (v, 8) for v in (0, 2, 4, 6)
    ]


def test_restarted_process_repeats_evaluations_not_stored() -> None:
    store = MemoryStore(uuid4().hex)
    first = ran(Beside(), store=store)
    kept = read_evaluations(store)
    for version in (2, 6):
        store.delete(f"evaluations/{version:08d}.json")
    again = Beside()
    ran(again, store=store)
    assert sorted(again.at) == [2, 6]
    assert read_evaluations(first.store) == kept


@pytest.mark.parametrize(
    "damaged", ["", "[]", "null", '{"version": 1}', '{"version": 1, "reason": 3, "accuracy": "all"}']
)
def test_damaged_evaluation_is_repeated_and_hides_no_other(damaged: str) -> None:
    run = MemoryStore(uuid4().hex)
    good = Evaluation(0, 0.5, 0.5, 8, 3.0, True)
    store_evaluation(run, good)
    store_skipped(run, EvaluationSkipped(2, "the weights of this version are gone"))
    run.put(evaluation_path(1), damaged.encode())
    run.put(skipped_path(1), damaged.encode())
    assert [is_evaluated(run, version) for version in range(4)] == [True, False, True, False]
    assert read_evaluations(run) == [good]
    assert [one.version for one in read_skipped(run)] == [2]


def test_pass_at_k_matches_a_hand_example() -> None:
    # 1 of 4 responses is right, and 3 of the 6 pairs do not contain it
    assert [pass_at(k, 4, 1) for k in (1, 2, 3, 4)] == [1 / 4, 1 / 2, 3 / 4, 1.0]
    # 2 of 5 responses are right; 3 of the 10 pairs and 1 of the 10 triples contain no right response
    assert [pass_at(k, 5, 2) for k in (1, 2, 3, 4)] == pytest.approx([0.4, 0.7, 0.9, 1.0], rel=1e-15)
    assert [pass_at(2, 4, right) for right in (0, 3, 4)] == [0.0, 1.0, 1.0]


def test_pass_at_k_equals_the_share_of_k_subsets_with_a_hit() -> None:
    for responses in range(1, 8):
        for right in range(responses + 1):
            verdicts = [place < right for place in range(responses)]
            for k in range(1, responses + 1):
                choices = [any(choice) for choice in itertools.combinations(verdicts, k)]
                assert pass_at(k, responses, right) == pytest.approx(sum(choices) / len(choices), rel=1e-15, abs=0)


def test_pass_at_k_of_many_responses_is_finite_and_grows() -> None:
    found = [pass_at(2**power, 2**14, 3) for power in range(15)]
    assert found[0] == pytest.approx(3 / 2**14)
    assert found == sorted(found)
    assert found[-1] == 1.0


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (1, {}),
        (4, {2: (0 + 1 / 2 + 5 / 6) / 3, 4: 2 / 3}),  # 0, 1 and 2 of 4 responses are right
        (6, {2: (0 + 1 / 3 + 9 / 15) / 3, 4: (0 + 2 / 3 + 14 / 15) / 3}),  # of 6; the pairs that have none: 10, 6
    ],
)
def test_pass_at_k_uses_each_prompts_own_responses(samples: int, expected: dict[int, float]) -> None:
    asked: Counter[int] = Counter()

    async def score(request: ScoreRequest) -> Score:
        asked[request.reference["right"]] += 1
        return Score(float(asked[request.reference["right"]] <= request.reference["right"]), "by turns")

    async def main() -> Evaluation:
        engine = TimedEngine(SLOW)
        await engine.start()
        proxy = InferenceProxy([engine], 4)
        await proxy.update(0, Path(), WeightsProbe((), (), 0.1), "continue")
        prompts = [replace(prompt_at(right), reference={"right": right}) for right in range(3)]
        return await Evaluator(prompts, samples, 1.0, 8, score).run(proxy, 0)

    found = run_virtual(main())
    assert found.accuracy == pytest.approx((0 + min(1, samples) + min(2, samples)) / (3 * samples))
    assert found.pass_at == pytest.approx(expected)
    assert found.metrics == {"accuracy": found.accuracy, **{f"pass_at_{k}": v for k, v in found.pass_at.items()}}


def test_stored_evaluation_is_read_back_even_without_pass_at() -> None:
    run = MemoryStore(uuid4().hex)
    made = Evaluation(3, 0.5, 0.5, 8, 3.0, True, {2: 0.7, 4: 0.9})
    store_evaluation(run, made)
    earlier = {name: value for name, value in asdict(made).items() if name != "pass_at"} | {"version": 4}
    run.put(evaluation_path(4), json.dumps(earlier).encode())
    assert read_evaluation(run, 3) == made
    assert read_evaluation(run, 4) == replace(made, version=4, pass_at={})


def test_environment_measures_are_stored_only_if_present() -> None:
    run = MemoryStore(uuid4().hex)
    made = Evaluation(3, 0.5, 0.5, 8, 3.0, True, measures={"exploit ability": 0.25, "accuracy": 9.0})
    store_evaluation(run, made)
    store_evaluation(run, replace(made, version=4, measures={}))
    assert read_evaluation(run, 3) == made
    assert made.metrics == {"exploit_ability": 0.25, "accuracy": 0.5}
    assert "measures" not in json.loads(run.get(evaluation_path(4)))


class Measured(Environment):
    """An environment that measures the log-prob of a token."""

    async def play(self, episode: Episode) -> Score | None:
        made = await episode.generate(max_tokens=1)
        return None if made is None else Score(1.0, "said")

    async def measure(self, logprobs: LogProbs, ports: EnvironmentPorts) -> dict[str, float]:
        found = await logprobs([1, 2])
        return {} if found is None else {"first": found[0]}


class Knowing(TimedEngine):
    """An engine whose log-probs are the number of its version."""

    async def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        return (float(self.version),)


def test_evaluation_contains_the_measures_of_its_environment() -> None:
    class Measuring(Beside):
        def __call__(self, pipeline: Pipeline) -> Evaluations:
            found = super().__call__(pipeline)
            found._means = replace(found._means, evaluator=replace(found._means.evaluator, environment=Measured()))
            return found

        @asynccontextmanager
        async def _own(self) -> AsyncIterator[Engine]:
            engine = Knowing(SLOW)
            await engine.start()
            yield engine

    pipeline = ran(Measuring())
    found = read_evaluations(pipeline.store)
    assert [(one.version, one.measures) for one in found] == [(v, {"first": float(v)}) for v in (0, 2, 4, 6)]


def test_version_without_weights_is_skipped_with_a_reason() -> None:
    beside = Beside(gone=(2,))
    pipeline = ran(beside)
    assert [each.version for each in read_evaluations(pipeline.store)] == [0, 4, 6]
    assert read_skipped(pipeline.store) == [
        EvaluationSkipped(2, "the weights of this version are gone: version 2 is missing")
    ]


@pytest.mark.parametrize(("away", "evaluated", "skipped"), [(60.0, [0, 2, 4, 6], []), (1e9, [], [0, 2, 4, 6])])
def test_evaluation_is_repeated_while_its_judge_is_away(away: float, evaluated: list[int], skipped: list[int]) -> None:
    """If the judge is away for a minute, all versions are evaluated. If it never returns, all versions are skipped."""

    class Away(Beside):
        async def _score(self, request: ScoreRequest) -> Score:
            is_away = asyncio.get_running_loop().time() < away
            return Score(0.0, "no connection", Outcome.UNJUDGED) if is_away else Score(1.0)

    pipeline = ran(Away())
    assert [each.version for each in read_evaluations(pipeline.store)] == evaluated
    assert [each.version for each in read_skipped(pipeline.store)] == skipped


def test_weights_are_kept_until_their_evaluation_is_stored() -> None:
    begin(store := MemoryStore(uuid4().hex), keep_last=2, keep_every=100)
    (batches, scheduler), (policies, learner) = scheduling(store), learning(store)
    waiting = {3}
    policies = PolicyStore(policies.log, in_use=waiting.__contains__)
    for version in range(10):
        if version == 8:
            waiting.clear()
        publish(policies, learner)
        policies.prune(learner)
        batches.commit(scheduler, staged(version, version))
        there = [v for v in range(1, version + 1) if store.exists(policies.find(v).weights[0].path)]
        kept = list(range(max(1, version - 2), version + 1))
        assert there == sorted({*kept, *([3] if 3 <= version < 8 else [])})


def test_config_decides_whether_evaluation_has_its_own_engine() -> None:
    vllm, timed = VllmEngineConfig(max_concurrent_requests=7), TimedEngineConfig()
    small = RunConfig(engine=vllm).evaluation_engine(on_cpu=True)
    assert isinstance(small, TransformersEngineConfig)
    assert small.max_concurrent_requests == 7
    assert RunConfig(engine=vllm).evaluation_engine(on_cpu=False) == vllm
    assert RunConfig(engine=timed).evaluation_engine(on_cpu=True) == timed
    assert RunConfig(engine=VllmEngineConfig(replicas=2)).evaluation_engine(on_cpu=False) is None


def test_version_that_no_engine_loads_is_skipped() -> None:
    """An evaluation that cannot be made, for example with damaged weights, neither blocks the run forever nor uses up
    the engine's restarts."""

    class Refusing(TimedEngine):
        async def update(self, version: int, weights: Path) -> None:
            raise EngineFailed("these are not its weights")

    kept: list[Evaluation | EvaluationSkipped] = []
    limits = RecoveryConfig()
    budget = RestartBudget(limits)

    @asynccontextmanager
    async def engine() -> AsyncIterator[Engine]:
        yield Refusing(TimedEngineConfig())
        budget.spend("engine-evaluation", "it was closed")

    async def fetch(_: int) -> tuple[Path, WeightsProbe]:
        return Path(), WeightsProbe((), (), 0.1)

    async def nothing(_: object) -> bool:
        return False

    async def keep(found: Evaluation | EvaluationSkipped) -> None:
        kept.append(found)

    async def score(_: ScoreRequest) -> Score:
        return Score(1.0, "")

    means = EvaluationPorts(
        lambda _: True, nothing, engine, fetch, Evaluator((), 1, 0.0, 8, score), keep, 4, limits.restarts
    )
    due = Evaluations(means, 0)
    due.note_published(0)
    run_virtual(due.run())
    [one] = kept
    assert isinstance(one, EvaluationSkipped)
    assert "these are not its weights" in one.reason
