"""Tests the contract of learners, which `rollflow.tasks.learners.base` describes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import Corrupt, NotFinite, StoreFailed
from rollflow.storage.objects import Data
from rollflow.storage.objects.base import split_buffers
from rollflow.storage.records import GroupKey, StopReason, Trajectory, TrajectoryGroup
from rollflow.tasks.learners.base import WEIGHTS, Learner, LearnerStart
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.testing.bounds import assert_raises

PROBE = (3, 4, 5, 6)
AGAIN = "the same state and batch must give the same weights, bit for bit, so keep all of the state in `state`"
Files = dict[str, bytes]
Change = Callable[[dict[str, Tensor]], object]
Builder = Callable[[LearnerStart], Learner]
DAMAGES: tuple[Callable[[bytes], bytes], ...] = (
    lambda data: b"",
    lambda data: data[: len(data) // 2],
    lambda data: data[::-1],
)


def trajectory(prompt: list[int], response: list[int], sample: int = 0, reward: float = 0.0) -> Trajectory:
    """Return a trajectory: a prompt and a response that version 0 sampled."""
    tokens = (*prompt, *response)
    mask = (False,) * len(prompt) + (True,) * len(response)
    logprobs = (0.0,) * len(prompt) + tuple(-0.5 - 0.01 * t for t in response)
    versions = (-1,) * len(prompt) + (0,) * len(response)
    return Trajectory(sample, 0, tokens, mask, logprobs, versions, reward, "", StopReason.STOP)


def batch_of(*groups: list[Trajectory]) -> TrajectoryBatch:
    """Return a batch of groups."""
    made = [TrajectoryGroup(GroupKey(i, 0), f"p{i}", "d", tuple(g)) for i, g in enumerate(groups)]
    return TrajectoryBatch.from_groups(made)


def batch(seed: int, vocabulary: int = 300, logprob: float | None = None) -> TrajectoryBatch:
    """Return a batch of four groups of four answers; every second answer is right.

    `logprob` replaces the log-prob of the last token of the last answer.
    """
    draw = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, vocabulary, (count,), generator=draw).tolist()

    prompts = [tokens(5) for _ in range(4)]
    answers = [[tokens(2 + (seed + sample) % 4) for sample in range(4)] for _ in prompts]
    groups = [
        [trajectory(prompt, answer, sample, reward=float(sample % 2)) for sample, answer in enumerate(four)]
        for prompt, four in zip(prompts, answers, strict=True)
    ]
    if logprob is not None:
        last = groups[-1][-1]
        groups[-1][-1] = replace(last, logprobs=(*last.logprobs[:-1], logprob))
    return batch_of(*groups)


def joined(files: Mapping[str, Data]) -> Files:
    """Return copies of files as bytes. A copy is needed because a learner returns views of its tensors, which change in
    its next step.
    """
    return {name: b"".join(split_buffers(data)) for name, data in files.items()}


def saved(learner: Learner) -> tuple[Files, Files]:
    """Return a learner's weights and state as bytes."""
    return joined(learner.weights()), joined(learner.state())


def trained(learner: Learner, versions: int, vocabulary: int = 300) -> Learner:
    """Train the given number of versions."""
    for version in range(versions):
        learner.step(batch(version, vocabulary), version)
    return learner


def changed(files: Files, change: Change) -> Files:
    """Return the files, with `change` applied to the tensors of the largest file."""
    name = max((name for name in files if name.endswith(".safetensors")), key=lambda name: len(files[name]))
    tensors = load(files[name])
    change(tensors)
    return files | {name: save(tensors)}


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


def assert_refused(learner: Learner, weights: Files, state: Files) -> None:
    """Check that the learner's `load` raises `Corrupt` with one sentence."""
    with assert_raises(Corrupt, "`load` must raise Corrupt with one sentence for files of another model", r"^.+\Z"):
        learner.load(weights, state)


def model_logprobs(folder: Path, tokens: tuple[int, ...], dtype: str) -> list[float]:
    """Compute the log-probability of tokens[1:] given their prefixes, with transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    with torch.no_grad():
        logits = model(torch.tensor([list(tokens)])).logits[0, :-1].float()
    following = torch.tensor(tokens[1:]).unsqueeze(-1)
    return torch.log_softmax(logits, -1).gather(-1, following).squeeze(-1).tolist()


class LearnerContract:
    """Tests of a learner. A subclass builds the learner by `build`, for a policy with a tied output head."""

    vocabulary: ClassVar[int] = 250  # all token ids in the batches are smaller than this number

    def build(self, start: LearnerStart) -> Learner:
        """Return a new learner."""
        raise NotImplementedError(f"{type(self).__name__} must build the learner: def build(self, start)")

    @pytest.fixture
    def builder(self) -> Builder:
        """Return the function that builds a learner; a subclass may override this fixture."""
        return self.build

    @pytest.fixture
    def policy(self, tmp_path: Path) -> Path:
        """Build the folder of a small Llama policy, without weights."""
        folder = tmp_path / "policy"
        folder.mkdir()
        for name, data in build_cold_folder(ColdStart(hidden_size=64), ["1 + 1 = 2"]).items():
            (folder / name).write_bytes(data)
        return folder

    @pytest.fixture
    def start(self, policy: Path) -> LearnerStart:
        """Return the `LearnerStart` of a run of ten versions; a subclass may override this fixture."""
        return LearnerStart(policy, trained=False, versions=10, shard_bytes=100_000, first=partial(Path, policy))

    @pytest.fixture
    def learner(self, builder: Builder, start: LearnerStart) -> Learner:
        return builder(start)

    def batch(self, seed: int) -> TrajectoryBatch:
        """Return a batch whose tokens are in the policy's vocabulary."""
        return batch(seed, self.vocabulary)

    def train(self, learner: Learner, versions: int) -> Learner:
        """Train the given number of versions."""
        return trained(learner, versions, self.vocabulary)

    @pytest.mark.parametrize("versions", [0, 2])
    def test_restored_learner_takes_the_same_next_steps(
        self, learner: Learner, builder: Builder, start: LearnerStart, versions: int
    ) -> None:
        """The steps of both learners are equal bit for bit, so any version can be replayed.

        Before the call of `load`, the restored learner had another state.
        """
        before = saved(self.train(learner, versions))
        after = [
            (learner.step(self.batch(7 + version), version), saved(learner)) for version in (versions, versions + 1)
        ]
        other = self.train(builder(replace(start, trained=False, seed=99)), 1)
        torch.rand(7)  # the state of the random number generator is part of the learner's state
        other.load(*before)
        assert saved(other) == before, "`load` must restore weights and state, bit for bit"
        for version, (metrics, once) in enumerate(after, versions):
            assert other.step(self.batch(7 + version), version) == metrics, AGAIN
            assert saved(other) == once, AGAIN
            assert once[0] != before[0]
            assert once[1] != before[1]

    @pytest.mark.parametrize("versions", [0, 2])
    def test_learner_with_blank_weights_takes_the_same_next_step(
        self, learner: Learner, builder: Builder, start: LearnerStart, versions: int
    ) -> None:
        """After a restart, a learner starts with blank weights, and `load` is the first call."""
        before = saved(self.train(learner, versions))
        likely, metrics, after = learner.logprobs(PROBE), learner.step(self.batch(7), versions), saved(learner)
        other = builder(replace(start, trained=False, blank=True, seed=99))
        other.load(*before)
        assert saved(other) == before
        assert other.logprobs(PROBE) == likely
        assert other.step(self.batch(7), versions) == metrics, AGAIN
        assert saved(other) == after, AGAIN

    def test_learner_can_go_back_to_an_earlier_state(self, learner: Learner) -> None:
        """A learner goes back if a batch is voided while the learner trains on it."""
        before = saved(self.train(learner, 1))
        learner.step(self.batch(1), 1)
        once = saved(learner)
        learner.load(*before)
        assert saved(learner) == before, "`load` must restore weights and state, bit for bit"
        learner.step(self.batch(1), 1)
        assert saved(learner) == once, AGAIN

    @pytest.mark.parametrize("versions", [1, 2])
    def test_stored_tensors_stay_unchanged_until_they_are_written(self, learner: Learner, versions: int) -> None:
        """A version is stored while the next version is computed. If storing fails, the learner stays unchanged."""
        before = saved(self.train(learner, versions))
        given, seen = (learner.weights(), learner.state()), list[tuple[Files, Files]]()

        def settle() -> None:
            if not seen:
                seen.append((joined(given[0]), joined(given[1])))

        def full() -> None:
            raise StoreFailed("the store is full")

        sentence = "`step` must not change a stored tensor before it calls `settle`"
        with assert_raises(StoreFailed, "`step` must end if `settle` raises"):
            learner.step(self.batch(versions), versions, full)
        assert saved(learner) == before, sentence
        learner.step(self.batch(versions), versions, settle)
        assert seen == [before], sentence
        assert saved(learner) != before

    def test_different_batch_gives_different_weights(self, learner: Learner) -> None:
        before = saved(learner)
        learner.step(self.batch(0), 0)
        one = saved(learner)
        learner.load(*before)
        learner.step(self.batch(1), 0)
        assert saved(learner) != one, "another batch must give other weights"

    def test_reading_log_probs_does_not_change_the_learner(self, learner: Learner) -> None:
        before = saved(self.train(learner, 1))
        assert learner.logprobs(PROBE) == learner.logprobs(PROBE)
        assert learner.first_nonfinite() is None
        assert saved(learner) == before

    def test_same_start_gives_the_same_untrained_policy(self, builder: Builder, start: LearnerStart) -> None:
        fresh = replace(start, trained=False)
        first, again, other = (builder(s) for s in (fresh, fresh, replace(fresh, seed=3)))
        assert saved(first) == saved(again)
        assert saved(first)[0] != saved(other)[0]

    def test_weights_are_a_hugging_face_folder(self, learner: Learner, start: LearnerStart, tmp_path: Path) -> None:
        """Transformers computes the same log-probs from the stored weights. The tied output head is not stored."""
        self.train(learner, 1)
        (tmp_path / "config.json").write_bytes((start.folder / "config.json").read_bytes())
        for name, data in joined(learner.weights()).items():
            (tmp_path / name.removeprefix(WEIGHTS)).write_bytes(data)
        near = 1e-5 if start.dtype == "float32" else 0.05
        assert model_logprobs(tmp_path, PROBE, start.dtype) == pytest.approx(learner.logprobs(PROBE), abs=near), (
            "the stored weights must be a Hugging Face model with the learner's own log-probs"
        )
        if start.trained:
            before = model_logprobs(start.folder, PROBE, start.dtype)
            assert before != pytest.approx(learner.logprobs(PROBE), abs=1e-5), "a step must change the policy"
        stored = [name for file in tmp_path.glob("*.safetensors") for name in load(file.read_bytes())]
        assert "lm_head.weight" not in stored
        assert len(stored) == len(set(stored))

    def test_weights_and_state_differ_by_name(self, learner: Learner) -> None:
        self.train(learner, 1)
        assert all(name.startswith(WEIGHTS) for name in learner.weights()), f"names of weights begin with {WEIGHTS!r}"
        assert not any(name.startswith(WEIGHTS) for name in learner.state()), f"names of states have no {WEIGHTS!r}"
        assert len(learner.weights()) > 2  # there are several files of the configured size

    def test_stored_weights_are_those_of_the_model(self, learner: Learner) -> None:
        """A cold start trains the learner's model in place, and the learner stores the trained weights."""
        before = saved(learner)[0]
        with torch.no_grad():
            next(iter(learner.model.parameters())).add_(1.0)
        assert saved(learner)[0] != before

    def test_train_step_returns_finite_metrics(self, learner: Learner) -> None:
        metrics = learner.step(self.batch(0), 0)
        assert metrics
        assert all(math.isfinite(value) for value in metrics.values()), f"metrics must be finite: {metrics}"

    def test_logprobs_has_one_value_for_each_later_token(self, learner: Learner) -> None:
        found = learner.logprobs(PROBE)
        assert len(found) == len(PROBE) - 1
        assert all(logprob < 0 for logprob in found)

    def test_error_names_a_nonfinite_tensor(self, learner: Learner) -> None:
        files = saved(self.train(learner, 1))
        for part, value in product((0, 1), (math.nan, math.inf)):
            names: list[str] = []

            def spoil(tensors: dict[str, Tensor], value: float = value, names: list[str] = names) -> None:
                names.append(max(tensors, key=lambda name: tensors[name].numel() * tensors[name].is_floating_point()))
                tensors[names[0]].view(-1)[-1] = value

            wrong = list(files)
            wrong[part] = changed(files[part], spoil)
            learner.load(*wrong)
            assert [learner.first_nonfinite()] == names, "`first_nonfinite` must name the tensor"
            learner.load(*files)
            assert learner.first_nonfinite() is None

    def test_tensors_of_another_model_are_refused(self, learner: Learner) -> None:
        files = saved(self.train(learner, 1))
        learner.step(self.batch(1), 1)
        before = saved(learner)
        for part, change in product((0, 1), (drop, add, reshape, retype)):
            wrong = list(files)
            wrong[part] = changed(files[part], change)
            assert_refused(learner, *wrong)
            assert saved(learner) == before, (part, change)

    def test_damaged_files_are_refused(self, learner: Learner) -> None:
        files = saved(self.train(learner, 1))
        learner.step(self.batch(1), 1)
        before = saved(learner)
        for part, damage in product((0, 1), DAMAGES):
            name = max(name for name in files[part] if name.endswith(".safetensors"))
            wrong = list(files)
            wrong[part] = files[part] | {name: damage(files[part][name])}
            assert_refused(learner, *wrong)
            assert saved(learner) == before, (part, damage)

    def test_missing_or_swapped_weights_or_state_are_refused(self, learner: Learner) -> None:
        before = weights, state = saved(self.train(learner, 1))
        for wrong in ((weights, {}), ({}, state), (state, weights)):
            assert_refused(learner, *wrong)
            assert saved(learner) == before

    def test_state_without_one_of_its_files_is_refused(self, learner: Learner) -> None:
        """If a state without the critic's file were accepted, the critic would silently start again."""
        weights, state = before = saved(self.train(learner, 1))
        for part in {name.partition(".")[0].partition("-")[0] for name in state}:
            assert_refused(learner, weights, {name: data for name, data in state.items() if not name.startswith(part)})
        assert saved(learner) == before

    def test_batch_that_is_not_finite_is_refused(self, learner: Learner) -> None:
        before = saved(self.train(learner, 1))
        spoiled = batch(1, self.vocabulary, logprob=math.nan)
        with assert_raises(NotFinite, "`step` must raise NotFinite for a log-prob that is NaN"):
            learner.step(spoiled, 1)
        assert learner.first_nonfinite() is None, "NaN and infinity must never reach the weights"
        learner.load(*before)
        assert saved(learner) == before, "`load` must undo what a refused step has changed"
