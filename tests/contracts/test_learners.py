"""Tests the guarantees of a learner (`tasks/learners/base.py`) on each kind of learner.

To test a new learner, add a line to CASES.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from rollflow.flows.config_keys import sections_of
from rollflow.storage.records import Outcome
from rollflow.tasks.learners import build_learner
from rollflow.tasks.learners.base import Learner, LearnerStart
from rollflow.tasks.learners.config import CriticConfig, DeepSpeedTrain, Lora, ReferenceConfig, TorchTrain, TrainConfig
from rollflow.tasks.objectives.config import Correction, PartsObjective, Penalties
from rollflow.testing.learners import Builder, LearnerContract, batch_of, saved
from tests.support.tiny_policy import make_policy, make_weights

CASES: dict[str, TrainConfig] = {
    "torch": TorchTrain(warmup_versions=2),
    "torch, two steps a version": TorchTrain(
        minibatches=2, objective=PartsObjective(kind="decoupled-ppo"), schedule="linear"
    ),
    "torch, a look at the whole batch": TorchTrain(
        objective=PartsObjective(kind="m2po", correction=Correction(second_moment=30))
    ),
    "torch, entropy": TorchTrain(objective=PartsObjective(penalties=Penalties(entropy_weight=0.01))),
}
TO_REFERENCE = {"kl_to": "reference", "kl_weight": 0.1}
CASES |= {
    "torch, critic": TorchTrain(warmup_versions=2, minibatches=2, objective=PartsObjective(kind="ppo")),
    "torch, a critic's head": TorchTrain(objective=PartsObjective(kind="ppo"), critic=CriticConfig(model="head")),
    "torch, reference": TorchTrain(objective=PartsObjective(penalties=Penalties(**TO_REFERENCE))),
    "torch, a reference that moves, an adapted weight": TorchTrain(
        objective=PartsObjective(penalties=Penalties(**TO_REFERENCE, kl_target=0.01)),
        reference=ReferenceConfig(every=2),
    ),
    "torch, all roles, KL in the reward": TorchTrain(
        objective=PartsObjective(kind="ppo", penalties=Penalties(**TO_REFERENCE, kl_in="reward", kl_target=0.01)),
        minibatches=2,
    ),
}
CASES |= {
    "torch, bfloat16, all roles": TorchTrain(
        objective=PartsObjective(kind="ppo", penalties=Penalties(**TO_REFERENCE)), minibatches=2
    ),
    "torch, bfloat16": TorchTrain(warmup_versions=2, minibatches=2),
    "torch, bfloat16 without masters": TorchTrain(warmup_versions=2, master_dtype="policy"),
}
CASES |= {
    "torch, LoRA": TorchTrain(warmup_versions=2, lora=Lora(rank=4)),
    "torch, bfloat16, LoRA": TorchTrain(minibatches=2, lora=Lora(rank=4, targets=("q_proj", "mlp.down_proj"))),
    "torch, bfloat16 without masters, LoRA": TorchTrain(master_dtype="policy", lora=Lora(rank=4)),
    "torch, LoRA, a reference, a critic's head": TorchTrain(
        objective=PartsObjective(kind="ppo", penalties=Penalties(**TO_REFERENCE, kl_target=0.01)),
        critic=CriticConfig(model="head"),
        minibatches=2,
        lora=Lora(rank=4),
    ),
    "torch, LoRA, a reference that moves": TorchTrain(
        objective=PartsObjective(penalties=Penalties(**TO_REFERENCE)),
        reference=ReferenceConfig(every=2),
        lora=Lora(rank=4),
    ),
}
CASES |= {
    "DeepSpeed": DeepSpeedTrain(warmup_versions=2, zero=2),
    "DeepSpeed, ZeRO 1, bfloat16, a reference that moves": DeepSpeedTrain(
        objective=PartsObjective(penalties=Penalties(**TO_REFERENCE, kl_target=0.01)),
        reference=ReferenceConfig(every=2),
        zero=1,
    ),
    "DeepSpeed, ZeRO 3, critic": DeepSpeedTrain(minibatches=2, objective=PartsObjective(kind="ppo"), zero=3),
}
CASES["in parts, bfloat16, critic"] = TorchTrain(
    sharded=True, ranks=2, minibatches=2, objective=PartsObjective(kind="ppo")
)
CASES["two ranks, critic"] = TorchTrain(warmup_versions=2, minibatches=2, objective=PartsObjective(kind="ppo"), ranks=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a policy with a tied output head."""
    return make_weights(make_policy(tmp_path_factory.mktemp("policy")), seed=1)


def cases(*always: str) -> list[ParameterSet]:
    """Return all cases. Learners with several ranks take seconds to start, so most tests of these learners run only in
    `make soak`.
    """
    soak = {name for name in CASES if name.startswith(("DeepSpeed", "in parts", "two ranks"))} - set(always)
    return [pytest.param(name, marks=[pytest.mark.soak] if name in soak else []) for name in CASES]


def test_every_learner_kind_has_a_test_case() -> None:
    assert {type(config) for config in CASES.values()} == set(sections_of(TrainConfig))


class TestLearners(LearnerContract):
    """The learner contract, tested on each kind of learner."""

    vocabulary = 300

    @pytest.fixture(params=cases())
    def case(self, request: pytest.FixtureRequest) -> str:
        found: str = request.param
        return found

    @pytest.fixture
    def start(self, case: str, folder: Path) -> LearnerStart:
        dtype = "bfloat16" if "bfloat16" in case else "float32"
        return LearnerStart(
            folder, trained=True, dtype=dtype, versions=10, shard_bytes=100_000, first=partial(Path, folder)
        )

    @pytest.fixture
    def builder(self, case: str) -> Builder:
        return partial(build_learner, CASES[case])

    def test_left_out_responses_change_no_weights(self, builder: Builder, start: LearnerStart) -> None:
        """A step with responses that are left out gives the same bits as a step without them."""
        whole, alone = [], []
        for group in self.batch(0).groups():
            one = group.trajectories[2]
            lost = replace(one, left_out=True, reward=math.nan, outcome=Outcome.UNJUDGED)
            whole.append([*group.trajectories[:2], lost, *group.trajectories[3:]])
            alone.append([*group.trajectories[:2], *group.trajectories[3:]])
        found, expected = builder(start), builder(start)
        metrics, others = (
            learner.step(batch_of(*groups), 0) for learner, groups in ((found, whole), (expected, alone))
        )
        assert saved(found) == saved(expected)
        assert metrics["left_out_responses"] == len(whole)
        assert "left_out_responses" not in others

    @pytest.mark.parametrize(
        ("case", "versions"),
        [
            pytest.param(*case.values, versions, marks=case.marks)
            for versions, found in ((0, cases()), (2, cases("DeepSpeed", "two ranks, critic")))
            for case in found
        ],
        indirect=["case"],
    )
    def test_restored_learner_takes_the_same_next_steps(
        self, learner: Learner, builder: Builder, start: LearnerStart, versions: int
    ) -> None:
        """Two learners with several ranks also run this test in `make test`."""
        super().test_restored_learner_takes_the_same_next_steps(learner, builder, start, versions)
