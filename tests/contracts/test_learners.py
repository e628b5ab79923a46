"""The guarantees of every learner (`tasks/learners/base.py`), tested on each kind.

To test a new learner, add a line to CASES.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from safetensors.torch import load, save
from torch import Tensor

from rollflow.flows.config_keys import sections_of
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import Corrupt, StoreFailed
from rollflow.storage.objects import Data
from rollflow.storage.objects.base import split_buffers
from rollflow.tasks.learners import build_learner
from rollflow.tasks.learners.base import WEIGHTS, Learner, LearnerStart
from rollflow.tasks.learners.config import CriticConfig, DeepSpeedTrain, Lora, ReferenceConfig, TorchTrain, TrainConfig
from rollflow.tasks.objectives.config import Correction, PartsObjective, Penalties
from tests.support.tiny_policy import make_policy, make_weights, reference_logprobs
from tests.tasks.test_algorithms import batch_of, trajectory

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
PROBE = (3, 4, 5, 6)
Files = dict[str, bytes]
Change = Callable[[dict[str, Tensor]], object]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a policy with a tied output head."""
    return make_weights(make_policy(tmp_path_factory.mktemp("policy")), seed=1)


def cases(*always: str) -> list[ParameterSet]:
    """Return all cases. Sharded learners take seconds to start, so most tests of these run only in `make soak`."""
    soak = {name for name in CASES if name.startswith(("DeepSpeed", "in parts"))} - set(always)
    return [pytest.param(name, marks=[pytest.mark.soak] if name in soak else []) for name in CASES]


@pytest.fixture(params=cases())
def case(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def config(case: str) -> TrainConfig:
    return CASES[case]


@pytest.fixture
def start(case: str, folder: Path) -> LearnerStart:
    """Return the `LearnerStart` of a run of ten versions."""
    dtype = "bfloat16" if "bfloat16" in case else "float32"
    return LearnerStart(
        folder, trained=True, dtype=dtype, versions=10, shard_bytes=100_000, first=partial(Path, folder)
    )


@pytest.fixture
def learner(config: TrainConfig, start: LearnerStart) -> Learner:
    return build_learner(config, start)


def batch(seed: int) -> TrajectoryBatch:
    """Return a batch of four groups of four answers; every second answer is right."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 300, (count,), generator=draw).tolist()

    prompts = [tokens(5) for _ in range(4)]
    answers = [[tokens(2 + (seed + sample) % 4) for sample in range(4)] for _ in prompts]
    groups = [
        [trajectory(prompt, answer, sample, reward=float(sample % 2)) for sample, answer in enumerate(four)]
        for prompt, four in zip(prompts, answers, strict=True)
    ]
    return batch_of(*groups)


def joined(files: Mapping[str, Data]) -> Files:
    """Return files as bytes. A learner returns views of its tensors, which change with the learner's next step."""
    return {name: b"".join(split_buffers(data)) for name, data in files.items()}


def saved(learner: Learner) -> tuple[Files, Files]:
    """Return a learner's weights and state as bytes."""
    return joined(learner.weights()), joined(learner.state())


def trained(learner: Learner, versions: int) -> Learner:
    for version in range(versions):
        learner.step(batch(version), version)
    return learner


def changed(files: Files, change: Change) -> Files:
    """Return the files, with `change` applied to the tensors of the largest file."""
    name = max((name for name in files if name.endswith(".safetensors")), key=lambda name: len(files[name]))
    tensors = load(files[name])
    change(tensors)
    return files | {name: save(tensors)}


def test_there_is_a_case_for_every_kind() -> None:
    assert {type(config) for config in CASES.values()} == set(sections_of(TrainConfig))


# --- a step depends only on state and batch -----------------------------------------------------------------


@pytest.mark.parametrize("case", cases("DeepSpeed"), indirect=True)
@pytest.mark.parametrize("versions", [0, 2])
def test_restored_learner_takes_the_same_next_steps(
    learner: Learner, config: TrainConfig, start: LearnerStart, versions: int
) -> None:
    """The steps of both learners are equal bit for bit, so any version can be replayed.

    Before `load`, the restored learner had another state.
    """
    before = saved(trained(learner, versions))
    after = [(learner.step(batch(7 + version), version), saved(learner)) for version in (versions, versions + 1)]
    other = trained(build_learner(config, replace(start, trained=False, seed=99)), 1)
    torch.rand(7)  # the generator is part of the state
    other.load(*before)
    assert saved(other) == before
    for version, (metrics, once) in enumerate(after, versions):
        assert other.step(batch(7 + version), version) == metrics
        assert saved(other) == once
        assert once[0] != before[0]
        assert once[1] != before[1]


@pytest.mark.parametrize("versions", [0, 2])
def test_blank_learner_takes_the_same_next_step(
    learner: Learner, config: TrainConfig, start: LearnerStart, versions: int
) -> None:
    """A learner starts blank after a restart, and `load` is called first."""
    before = saved(trained(learner, versions))
    likely, metrics, after = learner.logprobs(PROBE), learner.step(batch(7), versions), saved(learner)
    other = build_learner(config, replace(start, trained=False, blank=True, seed=99))
    other.load(*before)
    assert saved(other) == before
    assert other.logprobs(PROBE) == likely
    assert other.step(batch(7), versions) == metrics
    assert saved(other) == after


def test_learner_can_go_back_to_an_earlier_state(learner: Learner) -> None:
    """A learner goes back if a batch is voided while the learner trains on it."""
    before = saved(trained(learner, 1))
    learner.step(batch(1), 1)
    once = saved(learner)
    learner.load(*before)
    assert saved(learner) == before
    learner.step(batch(1), 1)
    assert saved(learner) == once


@pytest.mark.parametrize("versions", [1, 2])
def test_stored_tensors_do_not_change_before_settle(learner: Learner, versions: int) -> None:
    """A version is stored while the next version is computed. If storing fails, the learner stays unchanged."""
    before = saved(trained(learner, versions))
    given, seen = (learner.weights(), learner.state()), list[tuple[Files, Files]]()

    def settle() -> None:
        if not seen:
            seen.append((joined(given[0]), joined(given[1])))

    def full() -> None:
        raise StoreFailed("the store is full")

    with pytest.raises(StoreFailed):
        learner.step(batch(versions), versions, full)
    assert saved(learner) == before
    learner.step(batch(versions), versions, settle)
    assert seen == [before]
    assert saved(learner) != before


def test_other_batch_gives_other_weights(learner: Learner) -> None:
    before = saved(learner)
    learner.step(batch(0), 0)
    one = saved(learner)
    learner.load(*before)
    learner.step(batch(1), 0)
    assert saved(learner) != one


def test_reading_changes_nothing(learner: Learner) -> None:
    before = saved(trained(learner, 1))
    assert learner.logprobs(PROBE) == learner.logprobs(PROBE)
    assert learner.first_nonfinite() is None
    assert saved(learner) == before


def test_same_start_gives_the_same_untrained_policy(config: TrainConfig, start: LearnerStart) -> None:
    fresh = replace(start, trained=False)
    first, again, other = (build_learner(config, s) for s in (fresh, fresh, replace(fresh, seed=3)))
    assert saved(first) == saved(again)
    assert saved(first)[0] != saved(other)[0]


# --- stored files ------------------------------------------------------------------------------------------


def test_weights_are_a_hugging_face_folder(learner: Learner, start: LearnerStart, tmp_path: Path) -> None:
    """Transformers computes the same log-probs from the stored weights. The tied output head is not stored."""
    trained(learner, 1)
    make_policy(tmp_path)
    for name, data in joined(learner.weights()).items():
        (tmp_path / name.removeprefix(WEIGHTS)).write_bytes(data)
    near = 1e-5 if start.dtype == "float32" else 0.05
    assert reference_logprobs(tmp_path, PROBE, dtype=start.dtype) == pytest.approx(learner.logprobs(PROBE), abs=near)
    assert reference_logprobs(start.folder, PROBE, dtype=start.dtype) != pytest.approx(
        learner.logprobs(PROBE), abs=1e-5
    )
    stored = [name for file in tmp_path.glob("*.safetensors") for name in load(file.read_bytes())]
    assert "lm_head.weight" not in stored
    assert len(stored) == len(set(stored))


def test_weights_and_state_differ_by_name(learner: Learner) -> None:
    trained(learner, 1)
    assert all(name.startswith(WEIGHTS) for name in learner.weights())
    assert not any(name.startswith(WEIGHTS) for name in learner.state())
    assert len(learner.weights()) > 2  # there are several files of the configured size


def test_stored_weights_are_those_of_the_model(learner: Learner) -> None:
    """A cold start trains the learner's model in place, and the learner stores the trained weights."""
    before = saved(learner)[0]
    with torch.no_grad():
        next(iter(learner.model.parameters())).add_(1.0)
    assert saved(learner)[0] != before


def test_step_returns_finite_metrics(learner: Learner) -> None:
    metrics = learner.step(batch(0), 0)
    assert metrics
    assert all(math.isfinite(value) for value in metrics.values())


def test_logprobs_has_one_value_for_each_later_token(learner: Learner) -> None:
    found = learner.logprobs(PROBE)
    assert len(found) == len(PROBE) - 1
    assert all(logprob < 0 for logprob in found)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("part", [0, 1], ids=["weights", "state"])
def test_nonfinite_tensor_is_named(learner: Learner, part: int, value: float) -> None:
    names: list[str] = []

    def spoil(tensors: dict[str, Tensor]) -> None:
        names.append(name := max(tensors, key=lambda name: tensors[name].numel() * tensors[name].is_floating_point()))
        tensors[name].view(-1)[-1] = value

    files = list(saved(trained(learner, 1)))
    files[part] = changed(files[part], spoil)
    learner.load(*files)
    assert learner.first_nonfinite() in names


# --- refused files -----------------------------------------------------------------------------------------


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors[max(tensors)]


def add(tensors: dict[str, Tensor]) -> None:
    tensors["exp_avg/of nobody"] = torch.zeros(2)


def reshape(tensors: dict[str, Tensor]) -> None:
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name] = tensors[name].reshape(-1)[:3].clone()


def retype(tensors: dict[str, Tensor]) -> None:
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name] = tensors[name].to(torch.float16)


@pytest.mark.parametrize("change", [drop, add, reshape, retype])
@pytest.mark.parametrize("part", [0, 1], ids=["weights", "state"])
def test_tensors_of_another_model_are_refused(learner: Learner, part: int, change: Change) -> None:
    files = list(saved(trained(learner, 1)))
    learner.step(batch(1), 1)
    before = saved(learner)
    files[part] = changed(files[part], change)
    assert_refused(learner, files[0], files[1])
    assert saved(learner) == before


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: data[::-1]])
@pytest.mark.parametrize("part", [0, 1], ids=["weights", "state"])
def test_damaged_files_are_refused(learner: Learner, part: int, damage: Callable[[bytes], bytes]) -> None:
    files = list(saved(trained(learner, 1)))
    learner.step(batch(1), 1)
    before = saved(learner)
    name = max(name for name in files[part] if name.endswith(".safetensors"))
    files[part] = files[part] | {name: damage(files[part][name])}
    assert_refused(learner, files[0], files[1])
    assert saved(learner) == before


@pytest.mark.parametrize("swap", [lambda w, s: (w, {}), lambda w, s: ({}, s), lambda w, s: (s, w)])
def test_missing_or_swapped_weights_or_state_are_refused(
    learner: Learner, swap: Callable[[Files, Files], tuple[Files, Files]]
) -> None:
    before = saved(trained(learner, 1))
    assert_refused(learner, *swap(*before))
    assert saved(learner) == before


def test_state_without_one_of_its_files_is_refused(learner: Learner) -> None:
    """If a state without the critic's file were accepted, the critic would silently start again."""
    weights, state = before = saved(trained(learner, 1))
    for part in {name.partition(".")[0].partition("-")[0] for name in state}:
        assert_refused(learner, weights, {name: data for name, data in state.items() if not name.startswith(part)})
    assert saved(learner) == before


def assert_refused(learner: Learner, weights: Files, state: Files) -> None:
    """Check that the learner's `load` raises `Corrupt` with one sentence."""
    with pytest.raises(Corrupt) as caught:
        learner.load(weights, state)
    assert len(str(caught.value).splitlines()) == 1
