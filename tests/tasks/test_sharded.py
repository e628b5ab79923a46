"""Tests DeepSpeed's ranks against one torch rank: their steps are the same, and their stored states are
interchangeable.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import ConfigError, NotFinite, RankFailed
from rollflow.tasks.learners import build_learner
from rollflow.tasks.learners.base import LearnerStart
from rollflow.tasks.learners.checkpoint.shards import from_files
from rollflow.tasks.learners.config import CriticConfig, DeepSpeedTrain, ReferenceConfig, TorchTrain, TrainConfig
from rollflow.tasks.learners.multi_rank.multi_rank_learner import MultiRankLearner
from rollflow.tasks.learners.updates import Updates
from rollflow.tasks.objectives.config import PartsObjective, Penalties
from rollflow.testing.learners import batch, changed, joined, saved
from tests.support.tiny_policy import make_policy, make_weights
from tests.tasks.test_ranks import one_with_signal

NEAR = 1e-5
KINDS: Mapping[str, Mapping[str, Any]] = {
    "GRPO": {},
    "GRPO, several passes": {"share_prefixes": "none", "micro_tokens": 16},
    "weight decay of matrices": {"weight_decay": 1.0},  # AdamW has two groups of parameters
    "decoupled PPO": {
        "minibatches": 2,
        "objective": PartsObjective(kind="decoupled-ppo"),
        "checkpoint_activations": True,
    },
    "PPO with a critic": {
        "minibatches": 2,
        "objective": PartsObjective(kind="ppo"),
        "critic": CriticConfig(learning_rate=1e-4),  # at a higher rate, AdamW would enlarge rounding errors
    },
    "a penalty to a reference": {
        "objective": PartsObjective(penalties=Penalties(kl_to="reference", kl_weight=0.1, kl_target=0.01)),
        "reference": ReferenceConfig(every=3),
    },
}
Batches = Callable[[int], TrajectoryBatch]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(make_policy(tmp_path_factory.mktemp("policy")), seed=1)


def begun(folder: Path, config: TrainConfig, dtype: str = "float32") -> Any:
    return build_learner(config, LearnerStart(folder, trained=True, versions=12, dtype=dtype))


def sharded(folder: Path, zero: int, dtype: str = "float32", seconds: float = 60.0, **given: Any) -> MultiRankLearner:
    config = DeepSpeedTrain.model_validate({"zero": zero, "rank_seconds": seconds, "learning_rate": 1e-4, **given})
    made: MultiRankLearner = begun(folder, config, dtype)
    return made


@cache
def alone(folder: Path, kind: str, batches: Batches = batch) -> tuple[Any, list[Mapping[str, float]]]:
    """Train one torch rank for ten steps; return the learner and the metrics of each step."""
    made = begun(folder, TorchTrain(learning_rate=1e-4, **KINDS[kind]))
    return made, [made.step(batches(version), version) for version in range(10)]


def farthest(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the largest absolute difference between elements of tensors with the same name."""
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def masters(made: Any) -> Mapping[str, Tensor]:
    """Return the float32 master weights, which the optimizer changes."""
    return {name.removeprefix("master/"): t for name, t in tensors(made).items() if name.startswith("master/")}


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the Euclidean distance between two sets of tensors."""
    assert one.keys() == other.keys()
    return math.sqrt(sum(float((one[name] - other[name]).square().sum()) for name in one))


def rank_of(made: MultiRankLearner) -> int:
    """Return the process id of rank 1."""
    pid = made._others._started[1].process.pid
    assert pid is not None
    return pid


def tensors(made: Any) -> Mapping[str, Tensor]:
    """Return all tensors that a learner stores."""
    return from_files({**made.weights(), **made.state()})


def assert_gathered_file_by_file(made: MultiRankLearner) -> None:
    """Check that listing the names of files needs no work of other ranks, and that a file is gathered from all ranks
    when it is read.
    """
    asked, ask = [], made._others.ask
    made._others.ask = lambda given: (asked.append(given.file), ask(given))  # type: ignore[method-assign,func-returns-value]
    files = {**dict.fromkeys(made.weights()), **dict.fromkeys(made.state())}
    roles = {"learner/critic.safetensors", "learner/reference.safetensors"} & files.keys()
    assert (len(files), asked) == (2 + len(roles), [])
    assert made.state()["learner/state.safetensors"]
    assert asked == ["learner/state.safetensors"]
    made._others.ask = ask  # type: ignore[method-assign]


def test_deepspeed_options_that_rollflow_sets_are_refused() -> None:
    for options in ({"gradient_clipping": 2.0}, {"zero_optimization": {"stage": 3}}):
        with pytest.raises(ValidationError, match=r"train\.options\..*: remove this key; set train\."):
            DeepSpeedTrain(options=options)
    assert DeepSpeedTrain(options={"zero_optimization": {"reduce_bucket_size": 1000}}).zero == 2
    with pytest.raises(ValidationError, match=r"train\.offload = 'all': .*; set zero = 3, or choose \"optimizer\""):
        DeepSpeedTrain(offload="all")


SOAK = pytest.mark.soak


@pytest.mark.long
@pytest.mark.parametrize(
    ("zero", "offload", "kind"),
    [
        (2, "none", "PPO with a critic"),
        pytest.param(3, "all", "PPO with a critic", marks=SOAK),
        pytest.param(1, "none", "PPO with a critic", marks=SOAK),
        *(
            pytest.param(z, "none", kind, marks=SOAK)
            for z in (1, 2, 3)
            for kind in KINDS
            if z == 3 or "PPO w" not in kind
        ),
        *(pytest.param(z, "optimizer", "PPO with a critic", marks=SOAK) for z in (1, 2, 3)),
    ],
)
def test_deepspeed_learner_trains_like_torch(folder: Path, zero: int, offload: str, kind: str) -> None:
    torch_one, expected = alone(folder, kind)
    made = sharded(folder, zero, offload=offload, **KINDS[kind])
    for version, one in enumerate(expected):
        told = made.step(batch(version), version)
        assert {name: told[name] for name in one} == pytest.approx(one, abs=NEAR, rel=1e-4)
    assert farthest(tensors(made), tensors(torch_one)) < NEAR
    assert made.logprobs((3, 4, 5)) == pytest.approx(torch_one.logprobs((3, 4, 5)), abs=NEAR * 10)
    assert_gathered_file_by_file(made)
    stored = saved(made)
    again = begun(folder, TorchTrain(learning_rate=1e-4, **KINDS[kind]))
    again.load(*stored)
    assert saved(again) == stored
    again.step(batch(10), 10)
    made.load(*saved(again))
    assert saved(made) == saved(again)
    made.step(batch(11), 11)
    again.step(batch(11), 11)
    assert farthest(tensors(made), tensors(again)) < NEAR
    assert made.first_nonfinite() is None
    weights, state = saved(made)
    made.load(weights, changed(state, lambda found: found[min(found)].view(-1)[-1].fill_(math.nan)))
    assert str(made.first_nonfinite()).startswith("exp_avg/")  # the NaN is in the part of the other rank
    made._others.end()


@pytest.mark.soak
def test_deepspeed_rank_without_rows_takes_part_in_the_step(folder: Path) -> None:
    torch_one, _ = alone(folder, "GRPO", one_with_signal)
    made = sharded(folder, 2, seconds=30.0)  # ranks may share a busy core
    for parameter in made.model.parameters():
        parameter.grad = torch.ones_like(parameter)  # gradients as a cold start leaves them
    for version in range(10):
        made.step(one_with_signal(version), version)
    assert farthest(tensors(made), tensors(torch_one)) < NEAR
    os.kill(rank_of(made), signal.SIGSTOP)
    with pytest.raises(RankFailed, match=r"^rank 1 of 2 did not reach the other ranks within 30 s"):
        made.step(one_with_signal(10), 10)


@pytest.mark.soak
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_deepspeed_weights_are_gathered_during_the_next_step(
    folder: Path, zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_gathered_beside_a_step(sharded(folder, zero, **KINDS["PPO with a critic"]), monkeypatch)


def assert_gathered_beside_a_step(made: MultiRankLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gather files during the passes of the next step, before the step changes the weights. Check that the files are
    those of the previous step, and that the step gives the same result.
    """
    made.step(batch(0), 0)
    before, found = saved(made), list[object]()
    made.step(batch(1), 1)
    expected = saved(made)
    made.load(*before)
    given, loss_of = (made.weights(), made.state()), Updates.compute_loss

    def gather() -> None:
        if len(found) < 2:
            found.append(tuple(map(joined, given)))

    with monkeypatch.context() as patched:
        patched.setattr(Updates, "compute_loss", lambda *given, **named: (loss_of(*given, **named), gather())[0])
        made.step(batch(1), 1, gather)
    assert found == [before, before]
    assert saved(made) == expected
    made._others.end()


@pytest.mark.long
@pytest.mark.parametrize(
    ("zero", "offload"),
    [
        (2, "none"),
        *(pytest.param(zero, "none", marks=SOAK) for zero in (1, 3)),
        *(pytest.param(zero, "optimizer", marks=SOAK) for zero in (1, 2)),
        pytest.param(3, "all", marks=SOAK),
    ],
)
def test_nonfinite_loss_changes_no_deepspeed_weight(
    folder: Path, zero: int, offload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first rank computes a NaN. The other rank stops, too, and the next step is as if without the NaN."""
    made, quiet = sharded(folder, zero, offload=offload), begun(folder, TorchTrain(learning_rate=1e-4))
    for one in (made, quiet):
        one.step(batch(0), 0)
    before, loss_of = saved(made), Updates.compute_loss
    with monkeypatch.context() as patched:
        patched.setattr(Updates, "compute_loss", lambda *given: loss_of(*given) * math.nan)
        with pytest.raises(NotFinite):
            made.step(batch(1), 1)
    assert saved(made) == before
    for one in (made, quiet):
        one.step(batch(1), 1)
    assert farthest(tensors(made), tensors(quiet)) < NEAR
    made._others.end()


@pytest.mark.soak
@pytest.mark.parametrize(("zero", "offload"), [*((zero, "none") for zero in (1, 2, 3)), (2, "optimizer"), (3, "all")])
def test_bfloat16_deepspeed_policy_has_float32_master_weights(folder: Path, zero: int, offload: str) -> None:
    """DeepSpeed and torch differ only by the rounding of gradients to bfloat16: by 1 to 3% of the change in ten steps,
    as with several torch ranks.

    The objective has no clipping: a token that rounding moves across a clipping bound would change the result far more
    (36% on one CPU).
    """
    kind = {**KINDS["GRPO, several passes"], "objective": PartsObjective(kind="rloo")}
    alone, again = (begun(folder, TorchTrain(learning_rate=1e-4, **kind), "bfloat16") for _ in range(2))
    made = sharded(folder, zero, "bfloat16", offload=offload, **kind)
    for version in range(10):
        alone.step(batch(version), version)
        made.step(batch(version), version)
    start, expected, found = from_files(again.weights()), masters(alone), masters(made)
    assert distance(found, expected) < 0.1 * distance({name: start[name].float() for name in expected}, expected)
    stored = saved(made)
    again.load(*stored)
    assert saved(again) == stored
    again.step(batch(10), 10)
    made.load(*saved(again))
    assert saved(made) == saved(again)
    made.load(stored[0], saved(again)[1])
    assert saved(made)[0] == stored[0]  # the learner's masters do not belong to these weights
    made._others.end()


@pytest.mark.soak
@pytest.mark.parametrize("zero", [2, 3])
def test_training_continues_after_a_killed_deepspeed_rank(
    folder: Path, zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank is killed while the first rank is in the middle of a step. A new learner continues with
    bit-identical results.
    """
    made = sharded(folder, zero)
    made.step(batch(0), 0)
    stored = saved(made)
    made.step(batch(1), 1)
    expected, loss_of = saved(made), Updates.compute_loss

    def kill(*given: Any) -> Tensor:
        os.kill(rank_of(made), signal.SIGKILL)
        return loss_of(*given)

    with monkeypatch.context() as patched:
        patched.setattr(Updates, "compute_loss", kill)
        with pytest.raises(RankFailed, match=r"^rank 1 of 2 was killed by SIGKILL while version 3 was trained"):
            made.step(batch(2), 2)
    again = sharded(folder, zero)
    again.load(*stored)
    again.step(batch(1), 1)
    assert saved(again) == expected
    again._others.end()


@pytest.mark.soak
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_deepspeed_state_continues_on_another_number_of_ranks(folder: Path, zero: int) -> None:
    given = KINDS["PPO with a critic"]
    made = sharded(folder, zero, **given)
    made.step(batch(0), 0)
    stored = saved(made)
    made.step(batch(1), 1)
    expected = tensors(made)
    made._others.end()
    configs: list[TrainConfig] = [TorchTrain(learning_rate=1e-4, ranks=ranks, **given) for ranks in (1, 2, 4)]
    configs.append(DeepSpeedTrain(learning_rate=1e-4, ranks=4, zero=zero, **given))
    for config in configs:
        other = begun(folder, config)
        other.load(*stored)
        assert saved(other) == stored
        other.step(batch(1), 1)
        assert farthest(tensors(other), expected) < NEAR


def test_missing_deepspeed_is_refused_at_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollflow.tasks.learners.multi_rank.rank_process.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"^train.kind = deepspeed: DeepSpeed is not installed on this machine; install it"
    ):
        begun(folder, DeepSpeedTrain())
