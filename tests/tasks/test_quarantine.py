"""`train.not_finite = "skip"`: a nonfinite batch is voided, and its version is trained on another batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from rollflow.flows.commands.log import describe_entry
from rollflow.storage.audit.audit import audit
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import NotFinite
from rollflow.storage.log.entries import BatchVoided, TrainedGroup, entry_path
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import GroupKey
from rollflow.tasks.actors.learner import MAKINGS, LearnerActor
from rollflow.tasks.engines.base import Generation, GenerationRequest, TokenSpan
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.learners.base import WaitForPublish, no_wait
from rollflow.tasks.learners.torch_learner import TorchLearner
from rollflow.tasks.objectives.base import MaskedTokens, Objective, TokenLoss
from rollflow.tasks.rollout.group import sample_seed
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.restore import train_again
from rollflow.tasks.runtime.clock import run_virtual
from tests.support.log_model import read_log
from tests.support.log_runs import of_kind, read
from tests.support.pipeline import Pipeline
from tests.support.small_run import Halt, StoreFeed, batch, prepare_small, train_small
from tests.tasks.test_restore import breaking, consumed, hashes, moment, restored, row_of_the_embedding
from tests.tasks.test_scheduler import stopped

Prepare = Callable[..., RunContext]
WHY = "version 4 is not trained, because a log-prob of batch 3 is -inf"


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))

    def prepared(run_id: str = "small", dtype: str = "float32", **train: object) -> RunContext:
        given = {"not_finite": "skip", **train}
        return prepare_small(tmp_path, run_id, train=given, dtype=dtype, keep_last=10, state_every=2)

    return prepared


class Poisoned(StoreFeed):
    """A feed that puts a log-prob of -inf into batch `number` the first `makings` times that it is formed."""

    def __init__(
        self, context: RunContext, number: int = 3, makings: int = 1, *, dies: bool = False, ahead: bool = False
    ) -> None:
        super().__init__(context, ahead=ahead)
        self.poisoned, self.makings, self.dies = number, makings, dies

    def lease(self, number: int, deadline: float, *, afresh: bool = False) -> pa.Buffer:
        self.await_version(number)
        voids = self.context.log.state.voids
        if self.dies and voids and number == self.poisoned:
            raise Halt
        if number == self.poisoned and self.batches.find_waiting(number) is None and voids < self.makings:
            staged = batch(self.context, number, ahead=self.ahead)
            first = staged.groups[0].trajectories[-1]  # type: ignore[union-attr]
            bad = replace(first, logprobs=(*first.logprobs[:-1], -math.inf))
            group = replace(staged.groups[0], trajectories=(*staged.groups[0].trajectories[:-1], bad))  # type: ignore[union-attr,call-arg]
            self.batches.commit(self.writer, replace(staged, groups=(group, *staged.groups[1:])))
        return super().lease(number, deadline, afresh=afresh)


def assert_trained_on_another(context: RunContext, whole: RunContext, why: str) -> None:
    """Check that batch 3 was quarantined once, with its reason, and that the run ends as if the batch had been
    finite.
    """
    assert context.policies.newest() == 6
    [void] = of_kind(context.store, BatchVoided)
    assert isinstance(void.body, BatchVoided)
    assert (void.body.number, void.body.why, void.body.cause, void.role) == (3, why, "not-finite", "learner")
    assert describe_entry(void) == f"batch 3 voided (entry {void.body.entry}): {why}"
    assert context.store.exists(context.batches.read_commit(void.body.entry).file.path)
    assert consumed(context, 4) == [GroupKey(6, 1), GroupKey(7, 1)]
    assert hashes(restored(context, 6)[0]) == hashes(restored(whole, 6)[0])
    learner, _ = restored(context, 3)
    assert train_again(context.policies, context.batches, learner, 4).differences == ()
    report = audit(context.store, deep=True)
    assert report.violations == []
    assert report.quarantined == [f"{entry_path(void.body.entry)}: {why}"]
    assert report.fates["discarded: corrupt"] == 2
    assert (context.log.state.not_finite, context.log.state.redraws) == (0, {})


def test_version_is_trained_on_the_next_batch_after_a_nan_batch(small: Prepare) -> None:
    whole, context, notes = small("whole"), small("broken"), list[str]()
    train_small(whole)

    class Looking(Poisoned):
        def lease(self, number: int, deadline: float, *, afresh: bool = False) -> pa.Buffer:
            notes.append(actor.status().note)
            return super().lease(number, deadline, afresh=afresh)

    actor = LearnerActor(context, channel=Looking(context))
    assert actor.run() == 6
    assert f"batch 3 is quarantined and formed again: {WHY}" in notes
    assert_trained_on_another(context, whole, WHY)


def test_learner_restarted_after_a_nan_batch_waits_for_the_next(small: Prepare) -> None:
    whole, context = small("whole"), small("broken")
    train_small(whole)
    with pytest.raises(Halt):
        LearnerActor(context, channel=Poisoned(context, dies=True)).run()
    assert (context.policies.newest(), context.log.state.holes) == (3, [3])
    assert (context.log.state.not_finite, context.log.state.redraws) == (1, {6: 1, 7: 1})
    train_small(context)
    assert_trained_on_another(context, whole, WHY)


@pytest.mark.parametrize("where", [row_of_the_embedding, moment])
def test_nonfinite_version_is_trained_on_the_next_batch(
    small: Prepare, where: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, context = small("whole"), small("broken")
    train_small(whole)
    train_small(context, 3)
    sound, broken = TorchLearner.step, breaking(where, math.nan)

    def once(self: TorchLearner, batch: TrajectoryBatch, version: int, settle: WaitForPublish = no_wait) -> object:
        step = broken if version == 3 and not context.log.state.voids else sound
        return step(self, batch, version, settle)

    with monkeypatch.context() as patch:
        patch.setattr(TorchLearner, "step", once)
        train_small(context)
    [void] = of_kind(context.store, BatchVoided)
    assert isinstance(void.body, BatchVoided)
    assert void.body.why.startswith("version 4 is not published, because ")
    assert_trained_on_another(context, whole, void.body.why)


class SecondIsNaN(Objective):
    """An objective whose first loss is finite and all later ones are NaN."""

    def __init__(self, own: Objective) -> None:
        self.own, self.asked = own, 0

    def loss(self, tokens: MaskedTokens) -> TokenLoss:
        self.asked += 1
        found = self.own.loss(tokens)
        return found if self.asked == 1 else replace(found, loss_M=found.loss_M * math.nan)


TO_REFERENCE = {"kl_to": "reference", "kl_weight": 0.1, "kl_in": "reward", "kl_target": 0.01}
TOGETHER: dict[str, dict[str, object]] = {
    "plain": {},
    "a head": {"objective": {"kind": "ppo"}, "critic": {"model": "head"}, "checkpoint_activations": True},
    "all roles": {"objective": {"kind": "ppo", "penalties": TO_REFERENCE}, "reference": {"every": 2}},
    "an adapter": {"lora": {"rank": 4}, "objective": {"penalties": TO_REFERENCE}, "reference": {"every": 1}},
    "an adapter, a head": {"lora": {"rank": 2}, "objective": {"kind": "ppo"}, "critic": {"model": "head"}},
}


IN_BFLOAT16 = ("all roles", "an adapter, a head")  # `make test` runs each case in one dtype


@pytest.mark.parametrize(
    ("train", "dtype"),
    [
        pytest.param(
            keys,
            dtype,
            id=f"{name}-{dtype}",
            marks=() if (dtype == "bfloat16") == (name in IN_BFLOAT16) else pytest.mark.soak,
        )
        for name, keys in TOGETHER.items()
        for dtype in ("float32", "bfloat16")
    ],
)
def test_optimizer_steps_before_a_nan_minibatch_are_undone(
    small: Prepare, train: dict[str, object], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, context = (small(name, dtype, minibatches=2, **train) for name in ("whole", "broken"))
    train_small(whole)
    train_small(context, 3)
    whole_step = TorchLearner.step

    def step(self: TorchLearner, batch: TrajectoryBatch, version: int, settle: WaitForPublish = no_wait) -> object:
        own = self.objective
        if version == 3 and not context.log.state.voids:
            self.objective = SecondIsNaN(own)
        try:
            return whole_step(self, batch, version, settle)
        finally:
            self.objective = own

    with monkeypatch.context() as patch:
        patch.setattr(TorchLearner, "step", step)
        train_small(context)
    assert_trained_on_another(context, whole, "version 4 is not trained, because loss of batch 3 is nan")


def test_always_nonfinite_batch_stops_the_run(small: Prepare) -> None:
    """The message is one sentence, also after another learner has taken over in between."""
    context = small()
    with pytest.raises(Halt):
        LearnerActor(context, channel=Poisoned(context, makings=99, dies=True)).run()
    with pytest.raises(
        NotFinite, match=rf"^batch 3 was rejected {MAKINGS} times, the last time: {WHY}; fix the engine"
    ) as stop:
        LearnerActor(context, channel=Poisoned(context, makings=99)).run()
    assert len(str(stop.value).splitlines()) == 1
    assert len(of_kind(context.store, BatchVoided)) == context.log.state.not_finite == MAKINGS
    assert context.policies.newest() == 3
    assert audit(context.store).violations == []
    train_small(context)  # the cause is fixed
    assert context.policies.newest() == 6
    assert audit(context.store).violations == []


def test_not_finite_stop_ends_the_run_without_voiding_a_batch(small: Prepare) -> None:
    context = small(not_finite="stop")
    with pytest.raises(NotFinite, match=rf"^{WHY}; fix the engine"):
        LearnerActor(context, channel=Poisoned(context)).run()
    assert of_kind(context.store, BatchVoided) == []


# --- prompts ------------------------------------------------------------------------------------------------------


class Poisons(TimedEngine):
    """An engine that gives a log-prob of -inf for each of these seeds, every time."""

    def __init__(self, seeds: Collection[int]) -> None:
        super().__init__(TimedEngineConfig(max_concurrent_requests=8, max_new_tokens=64))
        self.seeds = seeds

    async def generate(self, request: GenerationRequest) -> Generation:
        made = await super().generate(request)
        if request.seed not in self.seeds:
            return made
        values = [*list(made.logprobs)[:-1], -math.inf]
        return replace(made, made=TokenSpan.of(made.tokens, values, made.versions))


@pytest.mark.parametrize("stops", [(), (0.4, 0.4, 0.4)], ids=["unbroken", "stopped"])
@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.5])
def test_responses_of_a_nan_batch_are_sampled_with_a_new_seed(alpha: float, stops: Collection[float]) -> None:
    """The engine gives the same response for the same seed; no prompt is lost."""
    store = MemoryStore(f"poison-{alpha}-{len(stops)}")
    poison = {sample_seed(0, prompt, 1) for prompt in (2, 9, 10)} | {sample_seed(0, 9, 0, redraws=1)}

    def pipeline() -> Pipeline:
        return Pipeline(store, async_ratio=alpha, engine_list=[Poisons(poison)])

    for after in stops:
        run_virtual(stopped(pipeline(), after))
    last = pipeline()
    run_virtual(last.run())
    report = audit(store)
    assert report.violations == []
    voids = [entry.body for entry in read(store) if isinstance(entry.body, BatchVoided)]
    assert 2 <= len(voids) <= 4
    assert {void.cause for void in voids} == {"not-finite"}
    read_log(store).check_end(last.versions, last.groups, last.state.in_flight)
    trained = {group.prompt for version in range(1, 7) for group in groups_of(last, version)}
    assert {2, 9, 10} <= trained


def groups_of(pipeline: Pipeline, version: int) -> Sequence[TrainedGroup]:
    entry = pipeline.policies.find(version).batch_entry
    assert entry is not None
    return pipeline.batches.read_commit(entry).groups
