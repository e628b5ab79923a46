"""Tests that methods that save memory do not change results: logits in chunks, and activation checkpointing."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from rollflow.storage.records import Trajectory
from rollflow.tasks.learners import malloc_trim
from rollflow.tasks.learners.forward import token_logprobs
from rollflow.tasks.learners.torch_learner import TorchLearner
from rollflow.tasks.policies import adding_embedding, adding_linear
from rollflow.tasks.policies.head import LMHead
from rollflow.testing.learners import batch, batch_of, saved, trajectory
from tests.contracts.test_shared_prompts import groups
from tests.contracts.test_token_logprobs import ARCHITECTURES, learner_of, model_of
from tests.support.tiny_policy import make_policy, make_weights
from tests.tasks.test_learner import learner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(make_policy(tmp_path_factory.mktemp("policy")), seed=1)


@pytest.mark.parametrize("chunk", [1, 4, 9, 1000])
def test_logit_chunks_by_row_have_whole_rows(folder: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows have 3, 1, 5, 4 and 4 tokens. A row that is longer than a chunk is a part of its own."""
    made = learner(folder).token_logprobs
    monkeypatch.setattr(token_logprobs, "LOGITS_BYTES", 4 * made._head.vocabulary * chunk)
    row_M = torch.tensor([7] * 3 + [2] + [5] * 5 + [1] * 4 + [9] * 4)
    parts = made.parts(row_M, by_token=False)
    assert [i for part in parts for i in range(17)[part]] == list(range(17))
    expected = {1: [3, 1, 5, 4, 4], 4: [4, 5, 4, 4], 9: [9, 8], 1000: [17]}
    assert [len(row_M[part]) for part in parts] == expected[chunk]


@pytest.mark.parametrize("chunk", [1, 4, 9, 1000])
def test_logit_chunks_by_token_never_exceed_the_limit(
    folder: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row may be split into several parts."""
    made = learner(folder).token_logprobs
    monkeypatch.setattr(token_logprobs, "LOGITS_BYTES", 4 * made._head.vocabulary * chunk)
    row_M = torch.tensor([7] * 3 + [2] + [5] * 5 + [1] * 4 + [9] * 4)
    parts = made.parts(row_M, by_token=True)
    assert [i for part in parts for i in range(17)[part]] == list(range(17))
    expected = {1: [1] * 17, 4: [3, 3, 4, 3, 4], 9: [8, 9], 1000: [17]}
    assert [len(row_M[part]) for part in parts] == expected[chunk]


@pytest.mark.parametrize("kind", ["grpo", "gspo", "kimi", "decoupled-ppo", "m2po"])
def test_train_step_in_chunks_equals_an_undivided_step(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update is the same even for objectives that need whole rows, and the number of logits in memory stays within
    the limit.
    """
    seen: list[int] = []
    logits = LMHead.__call__

    def noted(self: LMHead, hidden_MH: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden_MH))
        return logits(self, hidden_MH)

    monkeypatch.setattr(LMHead, "__call__", noted)

    def gradients(chunk: int, *, adds: bool = True) -> tuple[float, torch.Tensor]:
        keeps = {"correction": {"second_moment": 30}} if kind == "m2po" else {}  # else no token is kept
        made = learner(folder, objective={"kind": kind, **keeps}, max_grad_norm=1e9, learning_rate=1e-12)
        monkeypatch.setattr(token_logprobs, "LOGITS_BYTES", 4 * made.token_logprobs._head.vocabulary * chunk)
        if not adds:
            monkeypatch.setattr(made.token_logprobs, "add_in_place", nullcontext)
        assert made.token_logprobs._head._linear is not None
        assert made.token_logprobs._head._linear.gains
        seen.clear()  # forget the calls by which `LMHead` tests the model at its start
        found: list[torch.Tensor] = []
        monkeypatch.setattr(made.policy, "apply", lambda: found.extend(p.grad for p in made.model.parameters()))
        loss = made.step(batch(1), 0)["loss"]
        return loss, torch.cat([grad.flatten() for grad in found])

    monkeypatch.setattr(adding_linear, "PIECE_BYTES", 2**8)  # smaller pieces, because this policy's head is small
    monkeypatch.setattr(adding_embedding, "LEAST_BYTES", 0)
    (loss, whole), most = gradients(10**6), max(seen)
    part_loss, parts = gradients(7)
    assert max(seen) <= 7 < most
    assert part_loss == pytest.approx(loss, abs=1e-6)
    assert float((parts - whole).norm() / whole.norm()) < 1e-5
    for chunk, found in ((7, parts), (10**6, whole)):
        other = gradients(chunk, adds=False)[1]
        assert float((other - found).norm() / found.norm()) < 1e-6  # a tied head's gradient has another order of sums


@pytest.mark.parametrize("kind", ["kimi", "dppo", "grpo"])
def test_micro_batch_without_tokens_changes_nothing(folder: Path, kind: str) -> None:
    """Some objectives run every row, so a micro-batch may consist of rows without sampled tokens."""

    def weights(groups: list[list[Trajectory]]) -> object:
        made = learner(folder, objective={"kind": kind}, micro_tokens=12, share_prefixes="none")
        assert made.step(batch_of(*groups), 0)["loss"] != 0.0
        return saved(made)[0]

    full = [trajectory([5, 6, 7], [8 + sample] * 9, sample, reward=float(sample % 2)) for sample in range(4)]
    empty = [trajectory([5, 6, 7], [], sample, reward=float(sample % 2)) for sample in range(4)]
    assert weights([full, empty]) == weights([full])


def test_no_gradient_is_left_after_a_step(folder: Path) -> None:
    """Gradients that are kept would take a third as much memory as weights and moments together."""
    made = learner(folder, objective={"kind": "ppo"})
    made.step(batch(1), 0)
    assert made.critic is not None
    own = (*made.model.parameters(), *made.critic.model.parameters())
    assert all(parameter.grad is None for parameter in own)


@pytest.mark.skipif(malloc_trim._trim() is None, reason="this C library keeps what is freed")
def test_memory_freed_by_a_large_step_is_released() -> None:
    """The C library itself does not release free memory that lies between two allocated pieces."""
    code = """
import gc, sys, torch
from rollflow.tasks.learners.malloc_trim import release_memory
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
torch.empty(2**24, dtype=torch.uint8); gc.collect()  # from here on pieces of less are on the heap
pieces = [torch.ones(2**22, dtype=torch.uint8) for _ in range(40)]
before = resident()
del pieces[:39]
kept = before - resident()
release_memory([torch.empty(int(sys.argv[1]), dtype=torch.uint8)])  # memory that nobody writes to takes no room
print(kept < 2**26, before - resident() > 2**27)
"""
    for size, expected in ((2**28 - 1, "True False"), (2**28, "True True")):
        done = subprocess.run([sys.executable, "-c", code, str(size)], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


def stored(made: TorchLearner) -> object:
    for version in range(2):
        made.step(batch(version), version)
    return saved(made)


def test_recomputed_layers_give_the_same_bits(folder: Path) -> None:
    """Recomputed layers of the policy and of the critic give the same bits."""
    plain, again = (learner(folder, objective={"kind": "ppo"}, checkpoint_activations=on) for on in (False, True))
    calls: list[int] = []
    layer = again.model.get_decoder().layers[0].self_attn
    layer.register_forward_hook(lambda *_: calls.append(1))
    assert stored(plain) == stored(again)
    assert len(calls) == 4  # two versions, each with one forward pass and one recomputation


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_can_recompute_its_layers(name: str) -> None:
    """The gradient norm is the same with recomputed layers, which also shows that dropout stays off."""
    plain, again = (learner_of(model_of(name), checkpoint_activations=on) for on in (False, True))
    assert plain.step(groups(), 0)["grad_norm"] == pytest.approx(again.step(groups(), 0)["grad_norm"], rel=1e-6)
